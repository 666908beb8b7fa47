"""Log-probabilities of the reference, computed once before training (precompute_reference_logps).

They are keyed by the token ids of a pair, so they do not depend on the order of the data. A file in
the run's folder stores them for a resumed run, which adds those of the pairs that only it reads.
The weights of the reference are not needed afterwards.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

from maxtext.common import progress
from maxtext.common.errors import UserError
from maxtext.common.files import atomic_writer
from maxtext.common.log import LOGGER
from maxtext.common.trees import checksum
from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline import Batch, DataStreams
from maxtext.trainers.compilation.compile import default_options, lower
from maxtext.trainers.data_loader import open_eval_streams, open_train_streams, shard_batch
from maxtext.trainers.methods.preference.objective import REFERENCE_LOGPS, PreferenceObjective
from maxtext.trainers.run_context import RunContext
from maxtext.trainers.shardings import with_shardings

KEY_BYTES = 16
FILE = "reference_logps.npz"


class ReferenceLogps:
    """[chosen, rejected] sums of log-probabilities by the key of a pair. `extent`: that of
    `data_extent` for the data of which they are."""

    def __init__(self, values: dict[bytes, np.ndarray], extent: tuple[int, ...]):
        self.values = values
        self.extent = extent

    def add_fields(self, batch: Batch) -> Batch:
        """The batch with the fields of the reference. Raises UserError for a pair that was not in
        the data when they were computed."""
        try:
            logps = [self.values[key] for key in pair_keys(batch)]
        except KeyError as error:
            raise UserError(
                f"the data has changed since the reference was computed: delete {FILE} in the "
                "run's folder, or start again under a new run_name"
            ) from error
        columns = np.array(logps, np.float32).reshape(-1, 2)
        return batch | {REFERENCE_LOGPS[0]: columns[:, 0], REFERENCE_LOGPS[1]: columns[:, 1]}

    @classmethod
    def load(cls, path: Path, checksum: int) -> "ReferenceLogps | None":
        """The log-probabilities in a file; None if the reference had another checksum."""
        if not path.is_file():
            return None
        with np.load(path) as file:
            if int(file["checksum"]) != checksum:
                return None
            keys = [row.tobytes() for row in file["keys"]]
            extent = tuple(file["extent"].tolist()) if "extent" in file else ()
            return cls(dict(zip(keys, file["logps"], strict=True)), extent)

    def save(self, path: Path, checksum: int) -> None:
        keys = np.array([np.frombuffer(key, np.uint8) for key in self.values])
        with atomic_writer(path, "wb") as file:
            np.savez(
                file,
                keys=keys,
                logps=np.array(list(self.values.values())),
                checksum=checksum,
                extent=np.array(self.extent),
            )


def data_extent(config: MaxTextConfig) -> tuple[int, ...]:
    """How much of the data a run reads: its steps and their rows, and the same of evaluation, 0 if
    there is none."""
    train = config.steps, config.global_batch_size_to_train_on
    evaluation = config.eval_steps, config.global_batch_size_to_eval_on
    return (*train, *(evaluation if config.eval_interval > 0 else (0, 0)))


def pair_keys(batch: Batch) -> list[bytes]:
    """A key for each row of a batch, from its tokens and masks."""
    names = sorted(name for name in batch if name.startswith(("chosen_", "rejected_")))
    rows = range(len(batch[names[0]]))
    return [
        hashlib.blake2b(
            b"".join(np.ascontiguousarray(batch[name][row]).tobytes() for name in names),
            digest_size=KEY_BYTES,
        ).digest()
        for row in rows
    ]


def compute_reference_logps(
    context: RunContext, weights: Tree, known: ReferenceLogps | None = None
) -> ReferenceLogps:
    """Run the reference, which has these weights, over the pairs of training and evaluation that
    are not `known`."""
    config, values = context.config, dict(known.values if known else {})
    rows = config.global_batch_size_to_train_on
    train_streams = open_train_streams(context)
    try:
        add_batches(context, weights, train_streams, rows, config.steps, values)
    finally:
        train_streams.close()
    eval_streams = open_eval_streams(context)
    if eval_streams is not None:
        try:
            rows = config.global_batch_size_to_eval_on
            add_batches(context, weights, eval_streams, rows, config.eval_steps, values)
        finally:
            eval_streams.close()
    num_pairs = len(values) - (len(known.values) if known else 0)
    LOGGER.info("computed the reference of %d pairs", num_pairs)
    return ReferenceLogps(values, data_extent(config))


def add_batches(
    context: RunContext,
    weights: Tree,
    streams: DataStreams,
    rows: int,
    steps: int,
    values: dict[bytes, np.ndarray],
) -> None:
    program = None
    with progress.working("computing the log-probabilities of the reference"):
        for batch in limited(streams, steps):
            local_rows = streams.local_rows(rows)
            keys = pair_keys(batch)
            # Processes run the same programs, so none may leave a batch out by itself.
            if jax.process_count() == 1 and all(key in values for key in keys):
                continue
            program = program or compile_reference(context, rows)
            logps = program(weights, shard_batch(context, batch, streams, rows))
            columns = np.stack([np.asarray(side)[local_rows] for side in logps], axis=1)
            values.update(zip(keys, columns, strict=True))


def limited(streams: DataStreams, steps: int) -> Iterator[Batch]:
    for step, batch in enumerate(streams):
        if step == steps:
            return
        yield batch


def compile_reference(
    context: RunContext, rows: int
) -> Callable[[Tree, dict[str, jax.Array]], tuple[jax.Array, jax.Array]]:
    """(weights at step 0, batch) -> (chosen, rejected), [rows] each, on every device."""
    objective, shardings = context.objective, context.shardings
    assert isinstance(objective, PreferenceObjective)

    def run(weights: Tree, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return objective.compute_reference(weights, objective.reference_weights(weights), batch)

    abstract = with_shardings(context.abstract_weights, shardings.weights)
    jitted = jax.jit(run, out_shardings=shardings.replicated)
    batch = context.abstract_batch(rows)
    fields = {name: batch[name] for name in batch if name not in REFERENCE_LOGPS}
    return lower(context, jitted, abstract, fields).compile(default_options(context))


def load_or_compute(context: RunContext, folder: str, weights: Tree) -> ReferenceLogps:
    """The reference of a run, whose weights at step 0 are these; stored in its folder."""
    path, identity = Path(folder) / FILE, int(checksum(weights))
    known = ReferenceLogps.load(path, identity) if jax.process_count() == 1 else None
    if known is None or known.extent != data_extent(context.config):
        known = compute_reference_logps(context, weights, known)
        if context.config.enable_checkpointing and jax.process_count() == 1:
            known.save(path, identity)
    return known
