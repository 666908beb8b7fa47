"""A cache of compiled train steps, by batch size, by the number of segments in a row, and by the
tokens that rows of rollouts share.

Ramp-up changes the batch size. On one GPU, attention over packed rows is faster if the step knows a
bound on the segments (documents) of a row. So segment counts are rounded up to buckets, and a batch
runs the program of the smallest bucket that holds it. The choice depends on nothing but the batch.
With max_segments_per_seq there is one program, unless the data exceeds that bound.
"""

from typing import Any

import jax

from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER
from maxtext.kernels.attention import AUTOSELECTED, cudnn
from maxtext.layers.attention_sharding import packed_request
from maxtext.layers.specs import AttentionSpec, MlaSpec
from maxtext.models.registry import layers
from maxtext.trainers.compilation import aot
from maxtext.trainers.compilation.compile import compile_lowered, lower_train_step
from maxtext.trainers.data_loader import DeviceBatch
from maxtext.trainers.model_losses import needs_segment_mask
from maxtext.trainers.run_context import RunContext
from maxtext.trainers.step import TrainState

UNBOUNDED = -1  # the bucket of any number of segments
SMALLEST_BUCKET = 15  # segments; together with the padding after them, a power of two


class StepCache:
    """Runs each batch with the program for it, which is compiled on first use."""

    def __init__(self, context: RunContext):
        self.context = context
        self.largest_bucket = largest_segment_bucket(context)
        # by (rows, bucket, shared prefix)
        self.programs: dict[tuple[int, int, int], jax.stages.Compiled] = {}

    def __call__(self, state: TrainState, batch: DeviceBatch, key: jax.Array) -> Any:
        rows = next(iter(batch.fields.values())).shape[0]
        program = self.get(rows, batch.max_segments, batch.shared_prefix)
        return program(state, batch.fields, key)

    def get(self, rows: int, max_segments: int = 1, shared_prefix: int = 0) -> jax.stages.Compiled:
        """The program for batches of `rows` rows with at most `max_segments` segments each, and for
        groups of rollouts that share `shared_prefix` tokens."""
        bucket = self.segment_bucket(max_segments)
        if (program := self.programs.get((rows, bucket, shared_prefix))) is not None:
            return program
        if self.programs and self.largest_bucket:
            LOGGER.info(
                "compiling the step for rows of %s documents",
                "any number of" if bucket == UNBOUNDED else bucket,
            )
        elif self.programs and shared_prefix:
            LOGGER.info("compiling the step for prompts of at least %d tokens", shared_prefix + 1)
        context = self.bounded_context(bucket).with_shared_prefix(shared_prefix)
        self.programs[rows, bucket, shared_prefix] = load_or_compile(context, rows)
        return self.programs[rows, bucket, shared_prefix]

    def bounded_context(self, bucket: int) -> RunContext:
        config = self.context.config
        if bucket == config.max_segments_per_seq:
            return self.context
        bounded = config.model_copy(update={"max_segments_per_seq": bucket})
        return self.context.with_config(bounded)

    def segment_bucket(self, max_segments: int) -> int:
        bound = self.context.config.max_segments_per_seq
        if not self.largest_bucket or max_segments <= bound <= self.largest_bucket:
            return bound
        bucket = max(SMALLEST_BUCKET, (1 << max_segments.bit_length()) - 1)
        return bucket if bucket <= self.largest_bucket else UNBOUNDED


def load_or_compile(context: RunContext, rows: int) -> jax.stages.Compiled:
    """The step in compiled_trainstep_file, or one that is compiled now."""
    config = context.config
    if config.compile_topology:
        raise ConfigError(
            f"compile_topology={config.compile_topology} is for maxtext compile and estimate; "
            "training runs on the devices that are here: leave it out"
        )
    lowered = lower_train_step(context, rows)
    if not config.compiled_trainstep_file:
        return compile_lowered(context, lowered)
    compiled = aot.load(config.compiled_trainstep_file, context, lowered)
    LOGGER.info("the train step comes from %s and is not compiled", config.compiled_trainstep_file)
    return compiled


def largest_segment_bucket(context: RunContext) -> int:
    """The largest bound on the segments of a row that makes attention faster; 0 if none does.

    It is 0 on more than one device, so all processes of a run use the program of
    max_segments_per_seq, whatever segments each of them has.
    """
    config, devices = context.config, context.rules.mesh.devices
    uses_cudnn = config.attention in (AUTOSELECTED, "cudnn_flash_jax")
    if not uses_cudnn or config.compiled_trainstep_file or not needs_segment_mask(config):
        return 0
    if devices.size > 1 or devices.flat[0].platform != "gpu":
        return 0
    specs = [getattr(layer, "attention", None) for layer in layers(config)]
    sizes = config.max_target_length, config.dtype.value, "gpu"
    requests = [
        packed_request(spec, *sizes) for spec in specs if isinstance(spec, AttentionSpec | MlaSpec)
    ]
    limits = [
        cudnn.max_packed_segments(request.q_length, max(request.head_dim, request.v_head_dim))
        for request in requests
        if cudnn.unsupported_reason(request) is None
    ]
    largest = max(limits, default=1) - 1  # the padding takes one segment
    return largest if largest >= SMALLEST_BUCKET else 0
