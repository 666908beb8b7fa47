"""A model of known answers, for tests of the doors: it says the prompt backwards, then how its
tokens are drawn.
"""

import itertools
import signal
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import maxtext.inference
from maxtext.inference.text import Answer, Ask
from maxtext.tokenizers import ByteTokenizer
from tests.tokenizers.tiny import CHATML

IN_FLIGHT = 3


def write_checkpoint(folder: Path, *settings: str) -> Path:
    """A folder of ours that says what model it is of; its weights are never read."""
    folder.mkdir()
    save_file({"nothing": np.zeros(1, np.float32)}, folder / "weights.safetensors")
    small = ["vocab_size: 259", "base_emb_dim: 32", "base_num_decoder_layers: 2", *settings]
    (folder / "config.yml").write_text("\n".join(["base_config: base.yml", *small]) + "\n")
    return folder


class Talkative(ByteTokenizer):
    chat_template = CHATML


class FakeLLM:
    """`asked`: all asks; `keys`: what it was loaded with; `interrupt_after`: characters after which
    Ctrl-C comes.
    """

    made: "list[FakeLLM]" = []
    tokenizer_class: type | None = Talkative

    def __init__(self, place, keys):
        self.place, self.keys, self.asked = place, keys, []
        self.tokenizer = type(self).tokenizer_class() if type(self).tokenizer_class else None
        self.interrupt_after = None

    @classmethod
    def load(cls, place, progress=None, **keys):
        cls.made.append(cls(place, keys))
        return cls.made[-1]

    def said(self, ask):
        text = ByteTokenizer().decode(ask.prompt)[::-1]
        if ask.sampling.temperature:
            text += f" t={ask.sampling.temperature} k={ask.sampling.top_k} p={ask.sampling.top_p} seed={ask.seed}"
        return text[: ask.max_new_tokens]

    def serving(self, slots, length):
        assert slots == 1
        return self

    def run(self, asks):
        """A character at a time, then the answer."""
        (ask,) = asks
        self.asked.append(ask)
        answer = self.answer(0, ask)
        for number, character in enumerate(answer.text or ""):
            if number + 1 == self.interrupt_after:
                time.sleep(0.5)  # the main thread shows what came before
                signal.raise_signal(signal.SIGINT)
                time.sleep(0.5)  # the main thread hears it meanwhile
            yield character, None
        yield "", answer

    def answers(self, asks):
        """Several at a time, those that came last first."""
        asks = enumerate(asks)
        while taken := list(itertools.islice(asks, IN_FLIGHT)):
            for index, ask in reversed(taken):
                self.asked.append(ask)
                yield self.answer(index, ask)

    def answer(self, index, ask):
        if max(ask.prompt) >= 259 or min(ask.prompt) < 0:
            return Answer(index, (), None, "error", "token id is outside the vocabulary")
        text = self.said(ask)
        ids = tuple(ByteTokenizer().encode(text))
        log_probs = tuple(-0.5 - number for number in range(len(ids))) if ask.log_probs else ()
        return Answer(index, ids, text if self.tokenizer else None, "length", None, log_probs)


def install(monkeypatch):
    FakeLLM.made = []
    monkeypatch.setattr(maxtext.inference, "LLM", FakeLLM, raising=False)
    monkeypatch.setattr(maxtext.inference, "Ask", Ask, raising=False)
    return FakeLLM.made
