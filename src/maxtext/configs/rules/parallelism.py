"""Rules of the mesh, sharding and rematerialization keys."""

import re

from maxtext.configs.mesh_sizes import size_key
from maxtext.configs.problems import ProblemKind
from maxtext.configs.rules.rule import derived_rule, rule
from maxtext.configs.types import MaxTextConfig, Settings
from maxtext.configs.types.enums import ReorderStrategy, ShardMode


@rule("shard_mode")
def explicit_sharding_supports_the_features(settings: Settings) -> str | None:
    """Computations on whole matrices and state stored apart from its weight have no single layout
    that a type could express.
    """
    features = {
        "opt_type=muon": settings.opt_type.value == "muon",
        "shard_optimizer_over_data": settings.shard_optimizer_over_data,
        "optimizer_memory_host_offload": settings.optimizer_memory_host_offload,
        "parameter_memory_host_offload": settings.parameter_memory_host_offload,
        "mtp_num_layers": settings.mtp_num_layers > 0,
    }
    unsupported = [name for name, present in features.items() if present]
    if settings.shard_mode is ShardMode.EXPLICIT and unsupported:
        return f"shard_mode=explicit does not support {unsupported[0]}: set shard_mode=auto"
    return None


@rule("mesh_axes")
def mesh_axes_are_distinct(settings: Settings) -> str | None:
    repeated = sorted({axis for axis in settings.mesh_axes if settings.mesh_axes.count(axis) > 1})
    return f"mesh_axes names {', '.join(repeated)} more than once" if repeated else None


@rule("mesh_axes")
def mesh_axes_are_known(settings: Settings) -> str | None:
    keys = [key for key in Settings.model_fields if re.fullmatch(r"ici_\w+_parallelism", key)]
    known = ["stage" if key == "ici_pipeline_parallelism" else key[4:-12] for key in keys]
    unknown = [axis for axis in settings.mesh_axes if axis not in known]
    if unknown:
        return f"mesh_axes has unknown axes {', '.join(map(repr, unknown))}: use {', '.join(known)}"
    return None


@rule("logical_axis_rules")
def axis_rules_are_pairs(settings: Settings) -> str | None:
    for entry in settings.logical_axis_rules:
        shaped = isinstance(entry, list | tuple) and len(entry) == 2 and isinstance(entry[0], str)
        if not shaped or not isinstance(entry[1], list | tuple | str | None):
            return f"logical_axis_rules: {entry!r} is not a pair [name, [mesh axes]]"
    return None


@rule("optimizer_memory_host_offload")
def optimizer_state_has_one_location(settings: Settings) -> str | None:
    if settings.optimizer_memory_host_offload and settings.shard_optimizer_over_data:
        return (
            "optimizer_memory_host_offload and shard_optimizer_over_data exclude each other: keep "
            "one"
        )
    return None


@derived_rule("param_scan_axis")
def offloaded_layers_are_contiguous(config: MaxTextConfig) -> str | None:
    if config.parameter_memory_host_offload and config.scan_layers and config.param_scan_axis != 0:
        return (
            "parameter_memory_host_offload=true moves one layer at a time to the device, so "
            f"layers must be contiguous: set param_scan_axis=0 (it is {config.param_scan_axis}) or "
            "scan_layers=false"
        )
    return None


@rule("pipeline_fsdp_ag_once")
def one_way_to_gather_pipeline_weights(settings: Settings) -> str | None:
    if settings.pipeline_fsdp_ag_once and settings.pipeline_fsdp_ag_per_repeat:
        return "pipeline_fsdp_ag_once and pipeline_fsdp_ag_per_repeat exclude each other: keep one"
    return None


@derived_rule("enable_diloco")
def diloco_has_replicas(config: MaxTextConfig) -> str | None:
    if config.enable_diloco and config.num_diloco_replicas < 2:
        return (
            "enable_diloco=true needs at least two replicas: set dcn_diloco_parallelism or "
            "ici_diloco_parallelism"
        )
    return None


@derived_rule("max_target_length")
def context_divides_the_sequence(config: MaxTextConfig) -> str | None:
    chunks = config.context_parallel_size * (2 if config.context_parallel_load_balance else 1)
    if config.context_parallel_size > 1 and config.max_target_length % chunks:
        return (
            f"max_target_length={config.max_target_length} does not divide into {chunks} chunks "
            f"for {config.context_parallel_size} context shards (two chunks per shard with "
            "context_parallel_load_balance)"
        )
    return None


@derived_rule("context_parallel_load_balance")
def load_balancing_needs_an_even_number_of_shards(config: MaxTextConfig) -> str | None:
    if reorders_tokens(config) and config.context_parallel_size % 2:
        return (
            "context_parallel_load_balance needs an even number of context shards, not "
            f"{config.context_parallel_size}: change the number or set it to false"
        )
    return None


def reorders_tokens(config: MaxTextConfig) -> bool:
    """Whether tokens are reordered so that every context shard has the same work."""
    return config.context_parallel_load_balance and config.context_parallel_size > 1


@derived_rule("context_parallel_load_balance")
def load_balancing_needs_order_independence(config: MaxTextConfig) -> str | None:
    features = {
        "engram_layers": config.engram_layers,
        "mtp_num_layers": config.mtp_num_layers,
        "moba": config.moba,
        "capacity_factor": config.num_experts > 1 and config.capacity_factor > 0,
    }
    unsupported = [name for name, present in features.items() if present]
    if reorders_tokens(config) and unsupported:
        return (
            f"context_parallel_load_balance=true reorders tokens, which {unsupported[0]} does not "
            "support: set context_parallel_load_balance=false"
        )
    return None


@derived_rule("context_parallel_reorder_strategy", ProblemKind.INERT)
def reordering_needs_balance(config: MaxTextConfig) -> str | None:
    if (
        not reorders_tokens(config)
        and config.context_parallel_reorder_strategy is not ReorderStrategy.AUTO
    ):
        return (
            f"context_parallel_reorder_strategy={config.context_parallel_reorder_strategy.value} "
            "would do nothing: it needs context_parallel_load_balance=true and more than one "
            "context shard"
        )
    return None


# Mesh axes without a default rule, and what to use instead.
UNRULED_AXES = {
    "sequence": "ici_context_parallelism splits sequences",
    "tensor_transpose": "ici_tensor_parallelism splits layers, and ici_fsdp_transpose_parallelism "
    "weights along their other dimension",
    "context_autoregressive": "it splits the KV cache of generation, and training has none",
}


@derived_rule("mesh_axes")
def every_mesh_axis_splits_something(config: MaxTextConfig) -> str | None:
    named = {
        axis
        for _, axes in config.logical_axis_rules
        for axis in ([axes] if isinstance(axes, str) else axes or ())
    }
    sizes = zip(config.mesh_axes, config.ici_parallelism, config.dcn_parallelism, strict=True)
    idle = [(axis, ici, dcn) for axis, ici, dcn in sizes if ici * dcn > 1 and axis not in named]
    if not idle:
        return None
    axis, ici, dcn = idle[0]
    network, size = ("ici", ici) if ici > 1 else ("dcn", dcn)
    hint = UNRULED_AXES.get(axis, "use another axis")
    return (
        f"{size_key(axis, network)}={size} would split nothing: no rule of logical_axis_rules "
        f"names the mesh axis {axis}, so all its devices would compute the same: {hint}; to split "
        f"an axis of your choice, add [name, [{axis}]] to logical_axis_rules"
    )


@derived_rule("num_layers_per_pipeline_stage")
def pipeline_divides_the_layers(config: MaxTextConfig) -> str | None:
    if not config.using_pipeline_parallelism:
        return None
    stages = (
        config.ici_parallelism[config.mesh_axes.index("stage")]
        * config.dcn_parallelism[config.mesh_axes.index("stage")]
    )
    layers = (
        config.num_decoder_layers
        if config.pipeline_parallel_layers == -1
        else config.pipeline_parallel_layers
    )
    block = stages * config.num_layers_per_pipeline_stage
    if layers % block or (
        config.num_pipeline_repeats > 0 and layers != block * config.num_pipeline_repeats
    ):
        return (
            f"{layers} pipelined layers are not {stages} stages x "
            f"num_layers_per_pipeline_stage={config.num_layers_per_pipeline_stage} x "
            f"num_pipeline_repeats={config.num_pipeline_repeats}"
        )
    microbatches = config.num_pipeline_microbatches
    if microbatches > 0 and microbatches % stages:
        return (
            f"num_pipeline_microbatches={microbatches} is not a multiple of the {stages} pipeline "
            "stages"
        )
    return None
