"""Tiny models, packed batches, a train step that compiles in a second, and complete runs to
inspect.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
import pytest
import yaml

from maxtext.common.errors import UserError
from maxtext.configs.derive import Devices
from maxtext.configs.sources import from_overrides, from_python
from maxtext.input_pipeline import BatchIterator, loader
from maxtext.models.configuration import load
from maxtext.models.transformer import initial_weights
from maxtext.optimizers import learning_rate_schedule
from maxtext.sharding import use_rules
from maxtext.trainers import banner, train
from maxtext.trainers.build import build_run_context
from maxtext.trainers.model_losses import language_model_losses
from maxtext.trainers.run_context import RunContext
from maxtext.trainers.step import make_eval_step, make_train_step

VOCABULARY, LENGTH, ROWS = 41, 16, 8
# config.json attributes that have no key, here given like an override
HF_ATTRIBUTES = "architecture="
# One unrolled layer of the default block, in float32 throughout.
TINY = [
    "base_emb_dim=16", "base_num_query_heads=4", "base_num_kv_heads=2", "head_dim=8",
    "base_mlp_dim=32", "base_num_decoder_layers=1", f"vocab_size={VOCABULARY}",
    f"max_target_length={LENGTH}", "per_device_batch_size=8", "dtype=float32",
    "matmul_precision=highest", "remat_policy=none", "scan_layers=false", "dataset_type=synthetic",
    "attention=dot_product", "steps=50", "enable_tensorboard=false", "enable_checkpointing=false",
]  # fmt: skip
# The rate is learning_rate at every step.
CONSTANT_RATE = ["lr_schedule_type=wsd", "wsd_decay_steps_fraction=0", "warmup_steps_fraction=0"]


@dataclass
class Bench:
    """A configuration's train step, not donating, so that a state can be used again."""

    config: Any
    context: RunContext
    step: Any
    weights: Callable[[], Any]

    @cached_property
    def state(self):
        """The initial state."""
        return self.context.state_from_weights(self.weights())

    def __call__(self, batch, state=None):
        state, metrics = self.step(self.state if state is None else state, batch, self.context.key)
        return state, {name: float(value) for name, value in metrics.items()}

    def logits(self, weights, batch):
        """[rows, length, vocabulary] as the model gives them, without the loss head."""
        model = self.context.template.bind(weights)
        return model(batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"])


def with_defaults(overrides, defaults):
    """The overrides, after the defaults of the keys that they do not set."""
    given = {override.partition("=")[0] for override in overrides}
    return [
        *(override for override in defaults if override.partition("=")[0] not in given),
        *overrides,
    ]


@pytest.fixture(scope="session")
def configure():
    def make(*overrides):
        layer = from_overrides(
            override
            for override in with_defaults(overrides, TINY)
            if not override.startswith(HF_ATTRIBUTES)
        )
        hf_attributes = [
            yaml.safe_load(override.removeprefix(HF_ATTRIBUTES))
            for override in overrides
            if override.startswith(HF_ATTRIBUTES)
        ]
        layer |= from_python({"architecture": hf_attributes[0]} if hf_attributes else {})
        return load(None, layer, environ={}, devices=Devices(1))

    return make


@pytest.fixture(scope="session")
def make_bench(configure):
    """(overrides) -> a Bench. Equal overrides share a Bench, and equal models share initial
    weights."""
    benches: dict[tuple, Bench] = {}
    weights: dict[str, Any] = {}

    def make(*overrides):
        if overrides not in benches:
            # As from files: rows of synthetic data hold one document, so attention has no segment
            # mask.
            config = configure(*with_defaults(overrides, [*CONSTANT_RATE, "dataset_type=grain"]))
            context = build_run_context(config)
            step = make_train_step(
                context.objective, context.optimizer, learning_rate_schedule(config)
            )
            benches[overrides] = Bench(
                config, context, quick(step), lambda: initial(config, context)
            )
        return benches[overrides]

    def initial(config, context):
        """Op by op: models share the shapes of most weights, and one program for all of them takes
        long to compile."""
        shapes = f"{context.template.weights} {config.init_weights_seed}"
        if shapes not in weights:
            weights[shapes] = initial_weights(config)
        return weights[shapes]

    return make


def quick(function):
    jitted = jax.jit(function)

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
    row = {
        name: np.zeros(LENGTH, np.int32)
        for name in ("inputs", "targets", "position", "segmentation")
    }
    start = 0
    for number, length in enumerate(lengths, start=1):
        tokens = generator.integers(1, VOCABULARY, length + 1)
        span = slice(start, start + length)
        row["inputs"][span], row["targets"][span] = tokens[:-1], tokens[1:]
        row["position"][span], row["segmentation"][span] = np.arange(length), number
        start += length
    return row


@pytest.fixture(scope="session")
def packed():
    """Eight rows with 16, 11, 0, 5, 16, 2, 9 and 1 tokens to learn from, in one to three documents
    a row.
    """
    generator = np.random.default_rng(7)
    documents = [(16,), (4, 7), (), (5,), (6, 3, 7), (2,), (1, 8), (1,)]
    rows = [pack(lengths, generator) for lengths in documents]
    stacked = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return {
        "inputs": stacked["inputs"],
        "inputs_position": stacked["position"],
        "inputs_segmentation": stacked["segmentation"],
        "targets": stacked["targets"],
        "targets_position": stacked["position"],
        "targets_segmentation": stacked["segmentation"],
    }


class Program:
    """What a configuration computes, part by part, each traced on first use."""

    # in the order of cost: the first that differs decides
    PARTS = ("weights", "loss", "residuals", "start", "evaluation", "step")

    def __init__(self, config):
        self.config, self.context = config, build_run_context(config)

    def differs(self, other, parts=PARTS):
        """The first part in which two programs differ, or None."""
        return next((part for part in parts if getattr(self, part) != getattr(other, part)), None)

    @cached_property
    def weights(self):
        return str(self.context.template.weights)

    @cached_property
    def loss(self):
        return self.traced(self.losses, *self.inputs)

    @cached_property
    def residuals(self):
        """The forward pass with the residuals that it saves for the backward pass."""
        weights, *rest = self.inputs
        return self.traced(
            lambda weights, *rest: jax.vjp(lambda it: self.losses(it, *rest), weights),
            weights,
            *rest,
        )

    @cached_property
    def start(self):
        return self.traced(self.context.random_state)

    @cached_property
    def evaluation(self):
        step = make_eval_step(self.context.objective)
        return self.traced(
            step, self.context.template.weights, None, self.context.abstract_batch(self.rows)
        )

    @cached_property
    def step(self):
        context = self.context
        rate = learning_rate_schedule(self.config)
        step = make_train_step(
            context.objective,
            context.optimizer,
            rate,
            context.shardings.constrain_gradients,
        )
        return self.traced(
            step, context.abstract_state, context.abstract_batch(self.rows), context.abstract_key
        )

    @property
    def rows(self):
        return self.config.global_batch_size_to_train_on

    @property
    def inputs(self):
        dropping = self.config.enable_dropout and self.config.dropout_rate > 0
        return (
            self.context.template.weights,
            self.context.abstract_batch(self.rows),
            self.context.abstract_key if dropping else None,
        )

    def losses(self, weights, batch, key):
        losses = language_model_losses(self.config, self.context.template, weights, batch, key)
        return losses.sums, losses.aux_losses

    def traced(self, function, *inputs):
        with (
            use_rules(self.context.rules),
            jax.default_matmul_precision(self.config.matmul_precision.value),
        ):
            traced = jax.make_jaxpr(function)(*inputs)
        constants = [array.tobytes() for array in map(np.asarray, traced.consts)]
        return re.sub(r"0x[0-9a-f]+", "", str(traced)), constants


@pytest.fixture(scope="session")
def program():
    """(a configuration) -> its Program."""
    return Program


class Scripted(BatchIterator):
    """These batches, then the end."""

    def __init__(self, batches):
        self.batches, self.position = list(batches), 0

    def __next__(self):
        if self.position == len(self.batches):
            raise StopIteration
        self.position += 1
        return dict(self.batches[self.position - 1])

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]

    def reset(self):
        self.position = 0


@dataclass
class Run:
    """The state, records and files of a complete run."""

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


@pytest.fixture(scope="module")
def run_training(configure, light_compiler, tmp_path_factory):
    """Trains and returns the Run. `batches` replace the data; `before_step(step, state)` may
    replace the state. Drawing loss.png takes a third of the time of a short run: only with
    `plot`."""

    def run(*overrides, batches=None, before_step=None, plot=False):
        folder = tmp_path_factory.mktemp("run")
        metrics = folder / "metrics.jsonl"
        paths = (f"base_output_directory={folder}", "run_name=it", f"metrics_file={metrics}")
        one_stream = ("data_streams=1",) if batches is not None else ()
        result = Run(configure(*paths, *one_stream, *with_defaults(overrides, CONSTANT_RATE)))

        class Watched(train.Loop):
            def __init__(self, *arguments, **more):
                super().__init__(*arguments, **more)
                result.loop, inner = self, self.train_step

                def step(state, batch, key):
                    if before_step is not None:
                        state = before_step(self.step, state) or state
                    state, values = inner(state, batch, key)
                    result.history.append(copied(state.weights))
                    return state, values

                self.train_step = step

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "Loop", Watched)
            if not plot:
                patch.setattr(banner, "save_loss_png", lambda *_, **__: None)
            if batches is not None:
                patch.setattr(
                    loader,
                    "data_stream_factory",
                    lambda *_: lambda share: Scripted(batches),
                )
            try:
                result.result = train.train(result.config)
            except UserError as error:
                result.error = error
        result.records = (
            [read_record(line) for line in metrics.read_text().splitlines()]
            if metrics.exists()
            else []
        )
        summary = folder / "it" / "summary.json"
        result.summary = json.loads(summary.read_text()) if summary.exists() else None
        return result

    return run


def read_record(line):
    """A line of metrics, with the values that JSON cannot represent."""
    record = json.loads(line)
    return record | {name: float(value) for name, value in record.pop("not_finite", {}).items()}
