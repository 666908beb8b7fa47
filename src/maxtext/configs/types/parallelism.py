"""Keys of the device mesh, sharding rules and pipelining.

LOGICAL_AXIS_RULES is the default sharding: which mesh axes the logical axes use.
"""

from typing import Any, Literal

from maxtext.configs.types import inert
from maxtext.configs.types.enums import CustomRule, ReorderStrategy, ShardMode
from maxtext.configs.types.key import EXPLICIT_SHARDING, Group, key

# [logical axis, [mesh axes]]; several rules of one name are tried in order
LOGICAL_AXIS_RULES = [
    ["circular_repeats", []],
    ["activation_embed_and_logits_batch", ["data", "stage", "fsdp", "fsdp_transpose", "expert"]],
    [
        "activation_embed_and_logits_batch_sequence",
        ["data", "stage", "fsdp", "fsdp_transpose", "context", "expert"],
    ],
    ["activation_vocab", ["tensor", "tensor_sequence"]],
    ["activation_vocab", ["tensor"]],
    ["activation_vocab", ["tensor_sequence"]],
    ["vocab", ["tensor", "tensor_sequence", "autoregressive"]],
    ["embed_vocab", ["fsdp", "fsdp_transpose", "context", "expert"]],
    ["activation_batch_attn", ["data", "fsdp", "fsdp_transpose", "expert"]],
    ["activation_input_length_attn", ["tensor_sequence", "context"]],
    ["activation_heads", ["tensor", "tensor_sequence", "autoregressive"]],
    ["activation_kv_heads", ["tensor", "tensor_sequence"]],
    ["activation_length_attn", ["context"]],
    ["activation_q_length", ["context"]],
    ["activation_kv_length", []],
    ["activation_embed_attn", ["tensor"]],
    ["activation_kv", ["tensor", "tensor_sequence"]],
    ["activation_kv_batch", ["data", "fsdp", "fsdp_transpose", "expert"]],
    ["activation_kv_head_dim", ["tensor", "tensor_sequence"]],
    ["heads", ["tensor", "tensor_sequence", "autoregressive"]],
    ["q_heads", ["tensor", "tensor_sequence", "autoregressive"]],
    ["kv_heads", ["tensor", "tensor_sequence", "autoregressive"]],
    ["qkv", []],
    ["kv", []],
    ["kv_head_dim", []],
    ["q_lora", ["fsdp", "fsdp_transpose", "context", "expert"]],
    ["q_lora", ["fsdp", "context", "expert"]],
    ["q_lora_up_proj", []],
    ["kv_lora", ["fsdp", "fsdp_transpose", "context", "expert"]],
    ["kv_lora", ["fsdp", "context", "expert"]],
    ["kv_lora_up_proj", []],
    ["activation_batch_moe", ["data", "fsdp", "fsdp_transpose", "expert"]],
    ["activation_length_moe", ["context"]],
    ["activation_norm_length_moe", ["tensor_sequence", "context"]],
    ["activation_embed_moe", ["tensor"]],
    ["activation_mlp_moe", ["tensor", "tensor_sequence"]],
    ["activation_exp", ["expert"]],
    ["exp", ["expert"]],
    ["mlp_moe", ["fsdp_transpose", "tensor", "tensor_sequence", "autoregressive"]],
    ["embed_moe", ["fsdp", "fsdp_transpose", "context"]],
    ["embed_moe", ["fsdp", "context"]],
    ["activation_mlp", ["tensor", "tensor_sequence"]],
    ["activation_batch", ["data", "fsdp", "fsdp_transpose", "expert"]],
    ["activation_length", ["context"]],
    ["activation_norm_length", ["tensor_sequence", "context"]],
    ["activation_embed", ["tensor"]],
    ["activation_stage", ["stage"]],
    ["mlp", ["fsdp_transpose", "tensor", "tensor_sequence", "autoregressive"]],
    ["gdn_head", ["fsdp_transpose", "tensor", "tensor_sequence", "autoregressive"]],
    ["embed", ["fsdp", "fsdp_transpose", "context", "expert"]],
    ["embed", ["fsdp", "context", "expert"]],
    ["norm", ["tensor"]],
    ["layers", ["stage"]],
    ["diloco", []],
    ["engram_dim", ["tensor"]],
    ["dense_layers", []],
    ["moe_layers", []],
    ["local_layers", []],
    ["mhc", []],
    ["prefill_activation_length", ["context"]],
    ["prefill_activation_norm_length", ["tensor_sequence", "context"]],
    ["activation_prefill_kv_batch", ["data", "fsdp", "fsdp_transpose", "expert"]],
    ["decode_batch", ["data", "fsdp", "fsdp_transpose", "expert"]],
    ["decode_length", []],
    ["cache_heads", ["autoregressive", "tensor", "tensor_sequence"]],
    ["paged_kv_heads", ["tensor"]],
    ["cache_batch_prefill", []],
    ["cache_batch", []],
    ["cache_heads_none", []],
    ["cache_kv", []],
    ["cache_sequence", []],
    ["num_pages", []],
    ["tokens_per_page", []],
    ["paged_kv_head_dim_size", []],
    ["mlp_no_fsdp", ["tensor", "tensor_sequence", "autoregressive"]],
    ["exp_with_fsdp", ["fsdp"]],
]
# Mesh axes over which the batch is sharded when it is loaded onto the devices
DATA_SHARDING = [
    [
        "data",
        "stage",
        "fsdp",
        "fsdp_transpose",
        "context",
        "context_autoregressive",
        "tensor",
        "tensor_sequence",
        "expert",
        "autoregressive",
    ],
]


class HardwareAndMesh(Group):
    """Target hardware, the device mesh, and how layers and sequences use it."""

    hardware: Literal["tpu", "gpu", "gpu_multiprocess", "cpu"] = key(
        "tpu",
        "tpu: the best devices that JAX finds; gpu: requires a GPU; gpu_multiprocess: GPUs in"
        " several processes; cpu: only CPUs",
    )
    num_slices: int = key(
        -1,
        "Number of TPU slices (or nodes) joined by the data-centre network; -1: detected from"
        " the devices",
        low=1,
        special=(-1,),
    )
    mesh_axes: list[str] = key(
        [
            "data",
            "stage",
            "fsdp",
            "fsdp_transpose",
            "sequence",
            "context",
            "context_autoregressive",
            "tensor",
            "tensor_transpose",
            "tensor_sequence",
            "expert",
            "autoregressive",
        ],
        "Names of the mesh axes, in order; their sizes come from the ici_* and dcn_* keys",
    )
    shard_mode: ShardMode = key(
        ShardMode.AUTO,
        "Who decides intermediate shardings: auto (the XLA compiler) or explicit (JAX "
        "sharding in types)",
    )
    inhomogeneous_layer_cycle_interval: int = key(
        1,
        "Layers in one step of the scan: the length of the repeating pattern where layers differ",
        low=1,
    )
    scan_layers: bool = key(
        True,
        "Compile one layer and loop over stacked weights; false: unroll, slower to compile, "
        "faster on GPUs: the default there",
    )
    param_scan_axis: int = key(
        1, "Position of the layer axis in weights stacked by scan_layers", low=0
    )
    context_parallel_load_balance: bool = key(
        True,
        "Reorder the sequence so that every context shard has the same amount of causal "
        "attention work",
    )
    context_parallel_strategy: str = key(
        "all_gather",
        "How sequence shards attend to all keys: all_gather, ring, or ulysses (all-to-all "
        "from sequence to heads)",
        choices=("all_gather", "ring", "ulysses"),
        status=inert.CONTEXT_PARALLELISM,
    )
    context_parallel_reorder_strategy: ReorderStrategy = key(
        ReorderStrategy.AUTO,
        "Token order for load balance: auto, dual_chunk_swap (two mirrored chunks per rank) "
        "or striped",
    )
    custom_mesh: str = key(
        "",
        "Custom device order of a known topology: hybrid_ring_64x4 or hybrid_ring_32x8; "
        "empty: automatic",
        status=inert.DEVICE_ORDERS,
    )
    custom_mesh_and_rule: CustomRule = key(
        CustomRule.DEFAULT,
        "Named layout that replaces mesh axes, rules and data sharding, e.g. pure-fsdp; "
        "empty: the rules below",
    )
    allow_split_physical_axes: bool = key(
        False,
        "Let one physical TPU torus axis serve several mesh axes when shapes do not fit otherwise",
    )
    enable_nnx: bool = key(
        False,
        "Always on in effect: every module is a Flax NNX module",
        status=inert.ONE_MODEL,
        accepts=True,
    )
    optimize_mesh_for_tpu_v6e: bool = key(
        False,
        "Reorder devices within a TPU v6e (Trillium) slice into a ring that suits its network",
        status=inert.DEVICE_ORDERS,
    )
    shardy: bool = key(
        True, "Partition programs with the Shardy compiler pass; false: the older GSPMD"
    )
    pure_nnx_decoder: bool = key(
        False,
        "Always on in effect: the decoder is a Flax NNX module",
        status=inert.ONE_MODEL,
        accepts=True,
    )
    pure_nnx: bool = key(
        False,
        "Always on in effect: training steps run on split NNX state",
        status=inert.ONE_MODEL,
        accepts=True,
    )
    remove_size_one_mesh_axis_from_type: bool = key(
        True,
        "Drop mesh axes of size 1 from the array types JAX tracks, so such axes cannot cause "
        "mismatches",
        needs=EXPLICIT_SHARDING,
    )


class LayoutAndSharding(Group):
    """Rules that map tensor axes onto mesh axes, and their checks."""

    logical_axis_rules: Any = key(
        [],
        "Which mesh axes each logical axis may use: [name, [axes]]; several rules of one name"
        " are tried in order",
        base=LOGICAL_AXIS_RULES,
    )
    data_sharding: Any = key(
        [],
        "Mesh axes over which the batch is sharded when it is loaded onto the devices",
        base=DATA_SHARDING,
    )
    context_sharding: str = key(
        "context",
        "Mesh axis that splits the sequence length under context parallelism: context or expert",
        choices=("context", "expert"),
    )
    input_data_sharding_logical_axes: list[str] = key(
        [
            "activation_embed_and_logits_batch",
            "activation_norm_length",
        ],
        "Logical names of the input batch's two axes (batch, length), mapped by logical_axis_rules",
    )
    sharding_tolerance: float = key(
        0.02,
        "Largest fraction (0 to 1) of parameter bytes that may be replicated although they "
        "could be sharded, before the run fails",
        low=0,
        high=1,
    )
    shard_optimizer_over_data: bool = key(
        False,
        "ZeRO-1: also shard the optimizer state over the data axis, which saves memory but "
        "adds communication",
    )
    internal_compile: bool = key(
        False,
        "Compile ahead of time for Google-internal topology names instead of the public "
        "compile_topology list",
        status=inert.INTERNAL_TOPOLOGIES,
    )
    internal_compile_num_devices: int = key(
        -1,
        "Device count to compile for when internal_compile (Google-internal) is on; -1: unset",
        status=inert.INTERNAL_TOPOLOGIES,
    )
    compile_xla_flags: str = key(
        "", "Extra XLA options for train_compile, as space-separated --flag=value; empty: none"
    )


class DcnParallelism(Group):
    """How each mesh axis spreads over the network between slices."""

    dcn_diloco_parallelism: int = key(
        1,
        "How many DiLoCo replicas are spread over the network between slices; needs "
        "enable_diloco; -1 = infer",
        status=inert.DILOCO,
    )
    dcn_data_parallelism: int = key(
        -1,
        "Copies of the model across slices or nodes, each with its own part of the batch; -1 "
        "= all remaining slices",
    )
    dcn_fsdp_parallelism: int = key(
        1,
        "Splits weights (embedding dim) and batch over the slower network between slices; -1 "
        "= infer, 1 = off",
    )
    dcn_fsdp_transpose_parallelism: int = key(
        1, "Splits the MLP dim of weights, and the batch, across slices; -1 = infer, 1 = off"
    )
    dcn_sequence_parallelism: int = key(
        1, "Splits the length dim of activations across slices; -1 = infer, 1 = off"
    )
    dcn_context_parallelism: int = key(
        1, "Splits long sequences, attention included, across slices; -1 = infer, 1 = off"
    )
    dcn_context_autoregressive_parallelism: int = key(
        1, "Splits the cached key/value length across slices while decoding; -1 = infer, 1 = off"
    )
    dcn_tensor_parallelism: int = key(
        1,
        "Splits heads and MLP width across slices (much communication, so ICI is usually "
        "better); -1 = infer, 1 = off",
    )
    dcn_tensor_transpose_parallelism: int = key(
        1,
        "Second tensor-parallel axis across slices, for the embedding dim in 2D layouts; -1 ="
        " infer, 1 = off",
    )
    dcn_tensor_sequence_parallelism: int = key(
        1,
        "Tensor parallelism across slices whose norms are also split along the length; -1 = "
        "infer, 1 = off",
    )
    dcn_pipeline_parallelism: int = key(
        1,
        "Pipeline stages placed on different slices; total stages = this x the ICI value; -1 "
        "= infer, 1 = off",
        status=inert.PIPELINES,
    )
    dcn_expert_parallelism: int = key(
        1,
        "Places different MoE experts on different slices; outside MoE layers it splits the "
        "batch; -1 = infer, 1 = off",
    )
    dcn_autoregressive_parallelism: int = key(
        1, "Splits weights and cache heads across slices for decoding only; -1 = infer, 1 = off"
    )


class IciParallelism(Group):
    """How each mesh axis spreads over the fast links inside a slice."""

    ici_diloco_parallelism: int = key(
        1,
        "How many DiLoCo replicas live inside one slice or node; needs enable_diloco; -1 = infer",
        status=inert.DILOCO,
    )
    ici_data_parallelism: int = key(
        1,
        "Copies of the model inside one slice or node, each with its own part of the batch; "
        "-1 = infer, 1 = off",
    )
    ici_fsdp_parallelism: int = key(
        -1,
        "Splits weights (embedding dim), optimizer state and batch over the chips of a slice;"
        " -1 = all remaining chips",
    )
    ici_fsdp_transpose_parallelism: int = key(
        1,
        "Splits the MLP dim of weights, and the batch, over the chips of a slice; -1 = infer,"
        " 1 = off",
    )
    ici_sequence_parallelism: int = key(
        1, "Splits the length dim of activations over the chips of a slice; -1 = infer, 1 = off"
    )
    ici_context_parallelism: int = key(
        1,
        "Splits long sequences, attention included, inside a slice; see "
        "context_parallel_load_balance; -1 = infer, 1 = off",
    )
    ici_context_autoregressive_parallelism: int = key(
        1, "Splits the cached key/value length inside a slice while decoding; -1 = infer, 1 = off"
    )
    ici_tensor_parallelism: int = key(
        1, "Splits heads, MLP width and vocabulary over the chips of a slice; -1 = infer, 1 = off"
    )
    ici_tensor_transpose_parallelism: int = key(
        1,
        "Second tensor-parallel axis inside a slice, for the embedding dim in 2D layouts; -1 "
        "= infer, 1 = off",
    )
    ici_tensor_sequence_parallelism: int = key(
        1,
        "Tensor parallelism inside a slice whose norms are also split along the length; -1 = "
        "infer, 1 = off",
    )
    ici_autoregressive_parallelism: int = key(
        1, "Splits weights and cache heads inside a slice for decoding only; -1 = infer, 1 = off"
    )
    ici_pipeline_parallelism: int = key(
        1,
        "Pipeline stages inside one slice or node; total stages = this x the DCN value; -1 = "
        "infer, 1 = off",
        status=inert.PIPELINES,
    )
    ici_expert_parallelism: int = key(
        1,
        "Places different MoE experts on different chips; outside MoE layers it splits the "
        "batch; -1 = infer, 1 = off",
    )


class PipelineParallelism(Group):
    """How decoder layers become pipeline stages and how microbatches flow."""

    pipeline_fsdp_ag_per_repeat: bool = key(
        False,
        "Gather FSDP weights one repeat at a time, fetching the next repeat's while this one "
        "computes",
        status=inert.PIPELINES,
    )
    num_layers_per_pipeline_stage: int = key(
        1,
        "Decoder layers a stage runs in one visit; layers = stages x this x num_pipeline_repeats",
        low=1,
        status=inert.PIPELINES,
    )
    num_pipeline_repeats: int = key(
        -1,
        "Times that a microbatch passes all stages (circular pipeline); -1 = derive it from "
        "the layer count",
        low=1,
        special=(-1,),
        status=inert.PIPELINES,
    )
    pipeline_parallel_layers: int = key(
        -1,
        "Number of decoder layers that are pipelined; the others use the stage axis as data; "
        "-1 = all layers",
        low=0,
        special=(-1,),
        status=inert.PIPELINES,
    )
    num_pipeline_microbatches: int = key(
        -1,
        "Number of microbatches, a multiple of the stages; -1 = stages (2 x stages with "
        "delayed forwarding)",
        low=1,
        special=(-1,),
        status=inert.PIPELINES,
    )
    pipeline_delay_activation_forwarding: bool = key(
        False,
        "Forward activations one iteration later, which hides the transfer but lengthens the "
        "bubble",
        status=inert.PIPELINES,
    )
    pipeline_fsdp_ag_once: bool = key(
        False,
        "Gather FSDP weights once before all pipeline iterations: less traffic, more memory",
        status=inert.PIPELINES,
    )
    scan_pipeline_iterations: bool = key(
        True,
        "Compile the pipeline's time loop as one scan; false unrolls it, which compiles slower",
        status=inert.PIPELINES,
    )
    scan_pipeline_repeats: bool = key(
        True,
        "Compile the loop over circular repeats as a scan; false unrolls it",
        status=inert.PIPELINES,
        accepts=False,
    )
    scan_layers_per_stage: bool = key(
        False,
        "Compile the layers inside a stage as a scan; matters when "
        "num_layers_per_pipeline_stage > 1",
        status=inert.PIPELINES,
    )
    set_remat_policy_on_pipeline_iterations: bool = key(
        True,
        "Apply remat_policy around every pipeline iteration, so its activations are recomputed",
        status=inert.PIPELINES,
    )
    set_remat_policy_on_layers_per_stage: bool = key(
        False,
        "Apply remat_policy around each layer inside a stage as well; for stages of several layers",
        status=inert.PIPELINES,
    )
