"""The requests of one lease of an engine: text and choices around token ids.

`EngineSession` starts the sequences of a request, one for each of its `n` choices, turns their
step outputs into text deltas, and ends them at stop strings. `LLM` and `AsyncEngine` run on it.
"""

import itertools
from dataclasses import dataclass, replace

from maxtext.adapters.serving import LoadedAdapter
from maxtext.inference.engine.engine import InferenceEngine
from maxtext.inference.requests import Completion, CompletionDelta, GenerationRequest
from maxtext.inference.sampling.bad_words import TokenMatcher
from maxtext.inference.sampling.sampler import derive_seed, fold_seed
from maxtext.inference.text.processing import OutputProcessor
from maxtext.tokenizers import Tokenizer


@dataclass(frozen=True)
class PreparedRequest:
    """A request that the engine can serve: a prompt of token ids, and stop ids with the model's
    end-of-sequence ids among them. `original` is the request as it came.
    """

    request: GenerationRequest
    original: GenerationRequest
    adapter: LoadedAdapter | None = None
    grammar: TokenMatcher | None = None  # at the beginning of its text


class EngineSession:
    """`add` requests at any time, and call `step` while there are unfinished ones."""

    def __init__(self, engine: InferenceEngine, tokenizer: Tokenizer | None):
        self.engine = engine
        self.tokenizer = tokenizer
        self.sequence_ids = itertools.count()
        self.processors: dict[int, OutputProcessor] = {}  # by the id of the sequence
        self.num_generated = 0  # tokens
        self.sequences: dict[int, set[int]] = {}  # unfinished, by the id of the request

    @property
    def has_unfinished(self) -> bool:
        return bool(self.processors)

    def add(self, request_id: int, prepared: PreparedRequest) -> None:
        request = prepared.request
        self.sequences[request_id] = set()
        for choice in range(request.params.n):
            seed = choice_seed(request.params.seed, choice)
            sequence_id = next(self.sequence_ids)
            self.processors[sequence_id] = OutputProcessor(
                request_id, choice, prepared.original, request, self.tokenizer
            )
            self.sequences[request_id].add(sequence_id)
            params = request.params.with_valid(seed=seed)
            if choice > 0:  # all have the same prompt
                params = params.with_valid(prompt_logprobs=None)
            self.engine.add_request(
                sequence_id,
                replace(request, params=params),
                prepared.adapter,
                prepared.grammar and prepared.grammar.copy(),
            )

    def abort(self, request_id: int) -> None:
        """Drop a request: its slots and blocks are free at once. An unknown id is ignored."""
        for sequence_id in self.sequences.pop(request_id, ()):
            del self.processors[sequence_id]
            self.engine.abort(sequence_id)

    def step(self) -> list[CompletionDelta]:
        """Run a step of the engine, and return what it adds to each choice."""
        deltas = []
        for output in self.engine.step():
            processor = self.processors.get(output.request_id)
            if processor is None:
                continue  # a stop string has ended it
            num_before = len(processor.token_ids)
            delta = processor.add(output)
            self.num_generated += len(processor.token_ids) - num_before
            deltas.append(delta)
            if delta.completion is not None:
                if output.finish_reason is None:
                    self.engine.abort(output.request_id)
                self.finish(output.request_id, delta.completion)
        return deltas

    def finish(self, sequence_id: int, completion: Completion) -> None:
        del self.processors[sequence_id]
        unfinished = self.sequences[completion.index]
        unfinished.remove(sequence_id)
        if not unfinished:
            del self.sequences[completion.index]


def choice_seed(seed: int, choice: int) -> int:
    """The seed of a choice. The first has the seed itself, as if it were alone."""
    return seed if choice == 0 else derive_seed(fold_seed(seed), 0, choice)
