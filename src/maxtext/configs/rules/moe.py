"""Rules of the mixture-of-experts keys."""

import math

from maxtext.configs.problems import ProblemKind
from maxtext.configs.rules.rule import derived_rule, rule
from maxtext.configs.types import MaxTextConfig, Settings


@rule("num_experts_per_tok")
def tokens_choose_among_the_experts(settings: Settings) -> str | None:
    if settings.num_experts_per_tok > settings.num_experts:
        return (
            f"num_experts_per_tok={settings.num_experts_per_tok} is more than "
            f"num_experts={settings.num_experts}"
        )
    return None


@rule("n_routing_groups")
def routing_groups_divide_the_experts(settings: Settings) -> str | None:
    groups, topk = settings.n_routing_groups, settings.topk_routing_group
    if groups == -1 and topk == -1:
        return None
    if groups < 1 or not 1 <= topk <= groups:
        return (
            f"topk_routing_group={topk} must be in 1..n_routing_groups={groups}, or both must be -1"
        )
    if settings.num_experts % groups:
        return f"n_routing_groups={groups} does not divide num_experts={settings.num_experts}"
    if topk * settings.num_experts // groups < settings.num_experts_per_tok:
        return (
            f"topk_routing_group={topk} groups of {settings.num_experts // groups} experts are "
            f"fewer than num_experts_per_tok={settings.num_experts_per_tok}: keep more groups"
        )
    return None


@rule("first_num_dense_layers")
def dense_layers_are_among_the_layers(settings: Settings) -> str | None:
    if settings.first_num_dense_layers > settings.base_num_decoder_layers:
        return (
            f"first_num_dense_layers={settings.first_num_dense_layers} is more than "
            f"base_num_decoder_layers={settings.base_num_decoder_layers}"
        )
    return None


@rule("routed_bias_update_rate")
def loss_free_balancing_needs_a_bias(settings: Settings) -> str | None:
    if settings.routed_bias_update_rate > 0 and not settings.routed_bias:
        return "routed_bias_update_rate updates the router's bias: set routed_bias=true"
    return None


@rule("capacity_factor")
def capacity_needs_dense_matmul(settings: Settings) -> str | None:
    factor = settings.capacity_factor
    if factor <= 0 and factor != -1:
        return (
            f"capacity_factor={factor:g} is out of range: it must be above 0, or -1 to drop no "
            "tokens"
        )
    if factor > 0 and settings.sparse_matmul:
        return (
            f"capacity_factor={factor:g} drops tokens, which sparse_matmul=true never does: "
            "set sparse_matmul=false"
        )
    return None


@rule("ragged_buffer_factor")
def ragged_buffer_factor_is_positive(settings: Settings) -> str | None:
    factor = settings.ragged_buffer_factor
    if factor <= 0 and factor != -1:
        return (
            f"ragged_buffer_factor={factor:g} is out of range: it must be above 0, or -1 for all "
            "tokens"
        )
    return None


@derived_rule("ragged_buffer_factor", ProblemKind.INERT)
def ragged_buffer_bounds_something(config: MaxTextConfig) -> str | None:
    factor, size = config.ragged_buffer_factor, expert_parallel_size(config)
    if factor >= size:
        return (
            f"ragged_buffer_factor={factor:g} would do nothing: with experts over {size} "
            f"device{'s' * (size > 1)}, a buffer factor of {size} already holds all tokens; leave "
            "it -1"
        )
    return None


@derived_rule("use_ring_of_experts", ProblemKind.INERT)
def ring_of_experts_needs_expert_parallelism(config: MaxTextConfig) -> str | None:
    if config.use_ring_of_experts and expert_parallel_size(config) == 1:
        return (
            "use_ring_of_experts=true would do nothing: it needs expert parallelism; set "
            f"ici_expert_parallelism above 1, to a divisor of num_experts={config.num_experts}"
        )
    return None


@derived_rule("moe_fsdp_use_two_stage_all_gather", ProblemKind.INERT)
def two_stage_all_gather_needs_two_axes(config: MaxTextConfig) -> str | None:
    if config.moe_fsdp_use_two_stage_all_gather and not (
        num_shards(config, "fsdp") > 1 and num_shards(config, "fsdp_transpose") > 1
    ):
        return (
            "moe_fsdp_use_two_stage_all_gather=true would do nothing: it needs "
            "ici_fsdp_parallelism and ici_fsdp_transpose_parallelism above 1"
        )
    return None


@derived_rule("shard_exp_on_fsdp", ProblemKind.INERT)
def fsdp_has_several_devices(config: MaxTextConfig) -> str | None:
    if config.shard_exp_on_fsdp and fsdp_splits_nothing(config):
        return "shard_exp_on_fsdp=true would do nothing: it needs ici_fsdp_parallelism above 1"
    return None


@derived_rule("shard_exp_on_fsdp")
def fsdp_splits_the_experts(config: MaxTextConfig) -> str | None:
    if not config.shard_exp_on_fsdp or fsdp_splits_nothing(config):
        return None
    axes = axes_of(config, "exp_with_fsdp")
    shards = num_shards(config, *axes)
    if config.num_experts % shards:
        return (
            f"shard_exp_on_fsdp=true splits experts over {shards} devices, which do not divide "
            f"num_experts={config.num_experts}: change ici_fsdp_parallelism"
        )
    idle = axes_of(config, "exp") - axes
    if num_shards(config, *idle) > 1:
        return (
            f"shard_exp_on_fsdp=true leaves the mesh axis {sorted(idle)[0]!r} without experts: set "
            "its parallelism to 1, or add it to the rule exp_with_fsdp in logical_axis_rules"
        )
    return None


def fsdp_splits_nothing(config: MaxTextConfig) -> bool:
    return "fsdp" in axes_of(config, "exp_with_fsdp") and num_shards(config, "fsdp") == 1


def axes_of(config: MaxTextConfig, name: str) -> set[str]:
    """The mesh axes that may shard the logical axis `name`."""
    return {
        axis for rule_name, axes in config.logical_axis_rules if rule_name == name for axis in axes
    }


def num_shards(config: MaxTextConfig, *axes: str) -> int:
    """The product of the sizes of mesh axes."""
    sizes = zip(config.mesh_axes, config.ici_parallelism, config.dcn_parallelism, strict=True)
    return math.prod(ici * dcn for axis, ici, dcn in sizes if axis in axes)


def expert_parallel_size(config: MaxTextConfig) -> int:
    """The number of devices that divide the experts among them and exchange tokens."""
    named = axes_of(config, "exp_with_fsdp" if config.shard_exp_on_fsdp else "exp")
    count = num_shards(config, *(named & axes_of(config, "activation_exp")))
    return 1 if config.num_experts % count else count


@rule("capacity_factor")
def one_bound_of_expert_buffers(settings: Settings) -> str | None:
    if settings.capacity_factor > 0 and settings.ragged_buffer_factor > 0:
        return (
            "capacity_factor and ragged_buffer_factor both bound the tokens of an expert: set "
            "one, leave the other -1"
        )
    return None
