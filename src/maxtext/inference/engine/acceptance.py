"""When the engine drafts tokens: only while that is likely to pay.

Verifying drafts costs little while a decode step is bound by reading the weights, that is for few
sequences, and it pays only if enough drafts are accepted. The rules depend on the tokens alone and
not on time, so that all processes of a mesh dispatch the same programs.

Shapes: T steps, B rows of a batch, K drafted tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

WINDOW_STEPS = 64  # steps of single sequences over which the acceptance is measured
MIN_ACCEPTED = 0.25  # drafts a step of a sequence; fewer do not pay
PAUSE_PROGRAMS = 64  # decode programs without drafts, before they are tried again


@dataclass
class DraftControl:
    """How many tokens decode programs draft, and the counts of drafted and accepted tokens."""

    num_tokens: int  # K of programs with drafts; 0: the engine never drafts
    max_sequences: int  # of a program with drafts
    num_drafts: int = 0  # steps of single sequences with drafted tokens
    num_drafted: int = 0  # tokens
    num_accepted: int = 0
    window_steps: int = 0
    window_accepted: int = 0
    num_paused: int = 0  # decode programs without drafts that are still to come

    def next_drafts(self, num_sequences: int) -> int:
        """K of the next decode program, which has this many sequences; 0: it drafts no tokens."""
        if num_sequences > self.max_sequences:
            return 0
        if self.num_paused:
            self.num_paused -= 1
            return 0
        return self.num_tokens

    def each_mode(self) -> Iterator[None]:
        """Iterates over programs without drafts and with them, so that both are compiled, and
        forgets the drafts in the end."""
        if self.num_tokens:
            limit, self.max_sequences = self.max_sequences, 0
            yield
            self.max_sequences = limit
        yield
        self.num_drafts = self.num_drafted = self.num_accepted = 0
        self.window_steps = self.window_accepted = self.num_paused = 0

    def add(self, num_drafted: np.ndarray, tokens: np.ndarray) -> None:
        """Count the drafts [T, B] of a program with its sampled tokens [T * (K + 1), B]; a negative
        number is none. A step emits one token more than it accepts."""
        num_steps = int((num_drafted >= 0).sum())
        num_accepted = max(int((tokens >= 0).sum()) - num_steps, 0)
        self.num_drafts += int((num_drafted > 0).sum())
        self.num_drafted += int(num_drafted.clip(min=0).sum())
        self.num_accepted += num_accepted
        self.window_steps += num_steps
        self.window_accepted += num_accepted
        if self.window_steps < WINDOW_STEPS:
            return
        if self.window_accepted < MIN_ACCEPTED * self.window_steps:
            self.num_paused = PAUSE_PROGRAMS
        self.window_steps = self.window_accepted = 0
