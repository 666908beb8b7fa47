"""Tiny models, packed batches, a train step that compiles in a second, and whole runs to look into."""

import json
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from maxtext.common.errors import UserError
from maxtext.configs import load
from maxtext.configs.derive import Devices
from maxtext.input_pipeline import BatchIterator
from maxtext.models.transformer import initial_weights
from maxtext.optimizers import learning_rate_schedule
from maxtext.trainers import pretrain
from maxtext.trainers.setup import Setup
from maxtext.trainers.step import make_train_step

VOCABULARY, LENGTH, ROWS = 41, 16, 8
# One unrolled layer of the default block, in float32 throughout.
TINY = [
    "base_emb_dim=16", "base_num_query_heads=4", "base_num_kv_heads=2", "head_dim=8", "base_mlp_dim=32",
    "base_num_decoder_layers=1", f"vocab_size={VOCABULARY}", f"max_target_length={LENGTH}", "per_device_batch_size=8",
    "dtype=float32", "matmul_precision=highest", "remat_policy=none", "scan_layers=false", "dataset_type=synthetic",
    "attention=dot_product", "steps=50", "enable_tensorboard=false", "enable_checkpointing=false",
]  # fmt: skip
# The rate is learning_rate at every step.
CONSTANT_RATE = ["lr_schedule_type=wsd", "wsd_decay_steps_fraction=0", "warmup_steps_fraction=0"]
# XLA's work of optimising takes ten times as long as all that these tests compute.
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


@dataclass
class Bench:
    """A configuration's train step, not donating, so that a state can be used again."""

    config: Any
    setup: Setup
    state: Any
    step: Any

    def __call__(self, batch, state=None):
        state, metrics = self.step(self.state if state is None else state, batch, self.setup.key)
        return state, {name: float(value) for name, value in metrics.items()}

    def logits(self, weights, batch):
        """[rows, length, vocabulary] as the model gives them, without the loss head."""
        model = self.setup.template.bind(weights)
        return model(batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"])


def with_defaults(words, defaults):
    """The words, and those of the defaults whose keys they do not set."""
    given = {word.partition("=")[0] for word in words}
    return [*(word for word in defaults if word.partition("=")[0] not in given), *words]


@pytest.fixture(scope="session")
def configure():
    def make(*words):
        return load(None, with_defaults(words, TINY), environ={}, devices=Devices(1))

    return make


@pytest.fixture(scope="session")
def make_bench(configure):
    """A Bench of the words; the same words give the same one, and models of the same weights share them."""
    made: dict[tuple, Bench] = {}
    weights: dict[str, Any] = {}

    def make(*words):
        if words not in made:
            # As from files: rows of synthetic data hold one document, and attention need not keep them apart.
            config = configure(*with_defaults(words, [*CONSTANT_RATE, "dataset_type=grain"]))
            setup = Setup.of(config)
            step = make_train_step(config, setup.template, setup.optimizer, learning_rate_schedule(config))
            shapes = f"{setup.template.weights} {config.init_weights_seed}"
            if shapes not in weights:
                weights[shapes] = quick(lambda: initial_weights(config))()
            state = setup.first_state(weights[shapes])
            made[words] = Bench(config, setup, state, quick(step))
        return made[words]

    return make


def quick(function):
    jitted = jax.jit(function, compiler_options=QUICK)

    def run(*arguments):
        with jax.default_matmul_precision("highest"):
            return jitted(*arguments)

    return run


@pytest.fixture(scope="session")
def quickly():
    """jit for tests."""
    return quick


def pack(lengths, generator):
    """One row of documents of these lengths, then padding."""
    row = {name: np.zeros(LENGTH, np.int32) for name in ("inputs", "targets", "position", "segmentation")}
    start = 0
    for number, length in enumerate(lengths, start=1):
        tokens = generator.integers(1, VOCABULARY, length + 1)
        place = slice(start, start + length)
        row["inputs"][place], row["targets"][place] = tokens[:-1], tokens[1:]
        row["position"][place], row["segmentation"][place] = np.arange(length), number
        start += length
    return row


@pytest.fixture(scope="session")
def packed():
    """Eight rows with 16, 11, 0, 5, 16, 2, 9 and 1 tokens to learn from, in one to three documents a row."""
    generator = np.random.default_rng(7)
    documents = [(16,), (4, 7), (), (5,), (6, 3, 7), (2,), (1, 8), (1,)]
    rows = [pack(lengths, generator) for lengths in documents]
    joined = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return {
        "inputs": joined["inputs"],
        "inputs_position": joined["position"],
        "inputs_segmentation": joined["segmentation"],
        "targets": joined["targets"],
        "targets_position": joined["position"],
        "targets_segmentation": joined["segmentation"],
    }


@pytest.fixture(scope="module")
def light_compiler(tmp_path_factory):
    """Whole runs compile without XLA's optimisations, and a step that was compiled before is not compiled again."""
    cache = str(tmp_path_factory.getbasetemp() / "jax_cache")
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    yield cache
    jax.config.update("jax_disable_most_optimizations", False)
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
    compilation_cache.reset_cache()


class Scripted(BatchIterator):
    """These batches, then the end."""

    def __init__(self, batches):
        self.batches, self.place = list(batches), 0

    def __next__(self):
        if self.place == len(self.batches):
            raise StopIteration
        self.place += 1
        return dict(self.batches[self.place - 1])

    def get_state(self):
        return {"place": self.place}

    def set_state(self, state):
        self.place = state["place"]

    def reset(self):
        self.place = 0


@dataclass
class Run:
    """What a whole run left behind."""

    config: Any
    loop: Any = None
    result: Any = None
    error: UserError | None = None
    records: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] | None = None
    history: list[Any] = field(default_factory=list)  # the weights after each step, as numpy arrays

    def weights(self):
        return copied(self.loop.state.weights)


def copied(tree):
    return jax.tree.map(lambda leaf: np.array(leaf, copy=True), tree)


@pytest.fixture
def run_training(configure, light_compiler, monkeypatch, tmp_path):
    """Trains and returns the Run. `batches` replace the data; `before_step(step, state)` may return another state."""

    def run(*words, batches=None, before_step=None):
        number = sum(path.is_dir() for path in tmp_path.glob("run*"))
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        metrics = folder / "metrics.jsonl"
        places = (f"base_output_directory={folder}", "run_name=it", f"metrics_file={metrics}")
        made = Run(configure(*places, *with_defaults(words, CONSTANT_RATE)))

        class Watched(pretrain_loop):
            def __init__(self, *arguments, **more):
                super().__init__(*arguments, **more)
                made.loop, inner = self, self.train_step

                def step(state, batch, key):
                    if before_step is not None:
                        state = before_step(self.step, state) or state
                    state, values = inner(state, batch, key)
                    made.history.append(copied(state.weights))
                    return state, values

                self.train_step = step

        monkeypatch.setattr(pretrain, "Loop", Watched)
        if batches is not None:
            monkeypatch.setattr(pretrain, "make_train_iterator", lambda config: Scripted(batches))
        try:
            made.result = pretrain.train(made.config)
        except UserError as error:
            made.error = error
        monkeypatch.setattr(pretrain, "Loop", pretrain_loop)
        made.records = [read_record(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        summary = folder / "it" / "summary.json"
        made.summary = json.loads(summary.read_text()) if summary.exists() else None
        return made

    pretrain_loop = pretrain.Loop
    return run


def read_record(line):
    """A line of metrics; numbers that JSON does not have stand beside it by name."""
    record = json.loads(line)
    return record | {name: float(word) for name, word in record.pop("not_finite", {}).items()}
