"""The train step, compiled for each kind of batch when one first comes, or compiled ahead.

Ramp-up brings batches of several sizes. On one GPU, attention over packed rows is faster where the
step knows how many documents a row has at most; so each batch is counted before it is run, and goes
to the program for as few as it has: which one depends on nothing but the batch. With
max_segments_per_seq there is one program, unless a source of data does not keep to it.
"""

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from maxtext.common.log import LOGGER
from maxtext.kernels.attention import AUTOSELECTED, cudnn
from maxtext.layers.attention import AttentionSpec
from maxtext.layers.mla import MlaSpec
from maxtext.models.registry import layers
from maxtext.trainers import ahead
from maxtext.trainers.losses import Batch, separates
from maxtext.trainers.setup import Setup
from maxtext.trainers.step import TrainState

ANY = -1  # number of documents
FEWEST = 15  # documents that a program is for; with the padding after them, a power of two


class CompiledSteps:
    def __init__(self, setup: Setup):
        self.setup = setup
        self.limit = most_counted(setup)
        self.compiled: dict[
            tuple[int, int], jax.stages.Compiled
        ] = {}  # by rows, and documents of a row

    def for_rows(self, rows: int, documents: int = 1) -> jax.stages.Compiled:
        """For batches of so many rows with at most so many documents each."""
        most = self.most(documents)
        if (rows, most) not in self.compiled:
            if self.compiled and self.limit:
                LOGGER.info(
                    "compiling the step for rows of %s documents",
                    "any number of" if most == ANY else most,
                )
            self.compiled[rows, most] = ahead.train_step(self.bounded(most), rows)
        return self.compiled[rows, most]

    def bounded(self, most: int) -> Setup:
        """For rows of so many documents."""
        config = self.setup.config
        if most == config.max_segments_per_seq:
            return self.setup
        return replace(self.setup, config=config.model_copy(update={"max_segments_per_seq": most}))

    def most(self, documents: int) -> int:
        """How many documents a program for these is for."""
        bound = self.setup.config.max_segments_per_seq
        if not self.limit or documents <= bound <= self.limit:
            return bound
        most = max(FEWEST, (1 << documents.bit_length()) - 1)
        return most if most <= self.limit else ANY

    def __call__(self, state: TrainState, batch: Batch, key: jax.Array) -> Any:
        rows = batch["inputs"].shape[0]
        documents = most_documents(np.asarray(batch["inputs_segmentation"])) if self.limit else 1
        return self.for_rows(rows, documents)(state, batch, key)


def most_counted(setup: Setup) -> int:
    """Up to how many documents of a row programs differ by them; 0: they do not, and need not be
    counted.
    """
    config, devices = setup.config, setup.rules.mesh.devices
    fast = (
        config.attention in (AUTOSELECTED, "cudnn_flash_jax") and not config.compiled_trainstep_file
    )
    if not fast or not separates(config) or devices.size > 1 or devices.flat[0].platform != "gpu":
        return 0
    specs = [getattr(layer, "attention", None) for layer in layers(config)]
    sizes = config.max_target_length, config.dtype.value, "gpu"
    requests = [spec.request(*sizes) for spec in specs if isinstance(spec, AttentionSpec | MlaSpec)]
    able = [request for request in requests if cudnn.supports(request) is None]
    most = [
        cudnn.max_packed_segments(request.q_length, max(request.head_dim, request.v_head_dim))
        for request in able
    ]
    limit = max(most, default=1) - 1  # one is the padding after them
    return limit if limit >= FEWEST else 0


def most_documents(segments: np.ndarray) -> int:
    """Of a row [B, S]. Padding before or between them counts as one more."""
    changes = (segments[:, 1:] != segments[:, :-1]).sum(axis=1).max(initial=0)
    return max(int(changes), 1)
