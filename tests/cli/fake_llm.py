"""A model with known completions, for tests of commands: the prompt reversed, then how its tokens
are sampled.
"""

import itertools
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import maxtext.inference
from maxtext.inference.requests import Completion
from maxtext.inference.sampling.logprobs import TokenLogprobs
from maxtext.tokenizers import ByteTokenizer
from tests.tokenizers.tiny import CHATML

IN_FLIGHT = 3


def write_checkpoint(folder: Path, *settings: str) -> Path:
    """A native folder with the configuration of a model; its weights are never read."""
    folder.mkdir()
    save_file({"nothing": np.zeros(1, np.float32)}, folder / "weights.safetensors")
    small = ["vocab_size: 259", "base_emb_dim: 32", "base_num_decoder_layers: 2", *settings]
    (folder / "config.yml").write_text("\n".join(["base_config: base.yml", *small]) + "\n")
    return folder


class FakeTokenizer(ByteTokenizer):
    chat_template = CHATML


class FakeLLM:
    """`requests`: all requests; `interrupt_after`: characters after which Ctrl-C is pressed."""

    instances: "list[FakeLLM]" = []
    tokenizer_class: type | None = FakeTokenizer

    def __init__(self, config, checkpoint):
        self.config = config
        self.checkpoint = checkpoint
        self.requests = []
        self.tokenizer = type(self).tokenizer_class() if type(self).tokenizer_class else None
        self.interrupt_after = None
        self.engine = None  # which counts drafted tokens

    @classmethod
    def from_config(cls, config, checkpoint=None, progress=None, adapters=None):
        cls.instances.append(cls(config, checkpoint))
        return cls.instances[-1]

    def generate_text(self, request):
        params = request.params
        text = ByteTokenizer().decode(request.prompt)[::-1]
        if params.temperature:
            sampling = f"t={params.temperature} k={params.top_k} p={params.top_p}"
            text += f" {sampling} seed={params.seed}"
        return text[: params.max_new_tokens]

    def stream_completion(self, request):
        """A character at a time, then the completion."""
        self.requests.append(request)
        completion = self.complete(0, request)
        for number, character in enumerate(completion.text or ""):
            if number + 1 == self.interrupt_after:
                time.sleep(0.5)  # the main thread shows the text before
                signal.raise_signal(signal.SIGINT)
                time.sleep(0.5)  # the main thread handles it meanwhile
            yield character, None
        yield "", completion

    def completions(self, requests):
        """Several at a time, in reverse order."""
        requests = enumerate(requests)
        while batch := list(itertools.islice(requests, IN_FLIGHT)):
            for index, request in reversed(batch):
                self.requests.append(request)
                completion = self.complete(index, request)
                for choice in range(1 if completion.error else request.params.n):
                    yield replace(completion, choice=choice)

    def complete(self, index, request):
        if max(request.prompt) >= 259 or min(request.prompt) < 0:
            error = "token id is outside the vocabulary"
            return Completion(index, (), None, "error", error)
        text = self.generate_text(request)
        token_ids = tuple(ByteTokenizer().encode(text))
        log_probs = ()
        if request.params.logprobs is not None:
            log_probs = tuple(TokenLogprobs(-0.5 - number, {}) for number in range(len(token_ids)))
        shown = text if self.tokenizer else None
        return Completion(index, token_ids, shown, "length", None, log_probs)


def install(monkeypatch):
    FakeLLM.instances = []
    monkeypatch.setattr(maxtext.inference, "LLM", FakeLLM, raising=False)
    return FakeLLM.instances
