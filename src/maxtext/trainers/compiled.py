"""The train step, compiled for each kind of batch when one first comes, or compiled ahead.

Ramp-up brings batches of several sizes. On one GPU, attention over packed rows is faster where the step knows how many
documents a row has at most; so each batch is counted before it is run, and goes to the program for as few as it has.
With max_segments_per_seq there is one program, unless a source of data does not keep to it.
"""

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from maxtext.common.log import LOGGER
from maxtext.kernels.attention import AUTOSELECTED
from maxtext.kernels.attention.cudnn import TOKENS_OF_SEGMENT
from maxtext.trainers import ahead
from maxtext.trainers.losses import Batch, separates
from maxtext.trainers.setup import Setup
from maxtext.trainers.step import TrainState

ANY = -1  # number of documents
FEWEST = 15  # documents that a program is for; with the padding after them, a power of two


class CompiledSteps:
    def __init__(self, setup: Setup):
        self.setup = setup
        self.counting = counts(setup)
        self.compiled: dict[tuple[int, int], jax.stages.Compiled] = {}  # by rows, and documents of a row

    def for_rows(self, rows: int, documents: int = 1) -> jax.stages.Compiled:
        """For batches of so many rows with at most so many documents each."""
        fitting = [most for count, most in self.compiled if count == rows and (most == ANY or most >= documents)]
        if not fitting:
            most = self.most(documents)
            if self.compiled and self.counting:
                LOGGER.info("compiling the step for rows of %s documents", "any number of" if most == ANY else most)
            self.compiled[rows, most] = ahead.train_step(self.bounded(most), rows)
            fitting = [most]
        return self.compiled[rows, min(fitting, key=lambda most: float("inf") if most == ANY else most)]

    def bounded(self, most: int) -> Setup:
        """For rows of so many documents."""
        config = self.setup.config
        if most == config.max_segments_per_seq:
            return self.setup
        return replace(self.setup, config=config.model_copy(update={"max_segments_per_seq": most}))

    def most(self, documents: int) -> int:
        """How many documents a program for these is for."""
        bound = self.setup.config.max_segments_per_seq
        if not self.counting or documents <= bound:
            return bound
        most = max(FEWEST, (1 << documents.bit_length()) - 1)
        return most if most < self.setup.config.max_target_length // TOKENS_OF_SEGMENT else ANY

    def __call__(self, state: TrainState, batch: Batch, key: jax.Array) -> Any:
        rows = batch["inputs"].shape[0]
        documents = most_documents(np.asarray(batch["inputs_segmentation"])) if self.counting else 1
        return self.for_rows(rows, documents)(state, batch, key)


def counts(setup: Setup) -> bool:
    """Whether programs differ by how many documents a row has."""
    config, devices = setup.config, setup.rules.mesh.devices
    fast = config.attention in (AUTOSELECTED, "cudnn_flash_jax") and not config.compiled_trainstep_file
    return fast and separates(config) and devices.size == 1 and devices.flat[0].platform == "gpu"


def most_documents(segments: np.ndarray) -> int:
    """Of a row [B, S]. Padding before or between them counts as one more."""
    changes = (segments[:, 1:] != segments[:, :-1]).sum(axis=1).max(initial=0)
    return max(int(changes), 1)
