"""Specs of MLPs and of mixtures of experts."""

from dataclasses import dataclass, field

from maxtext.layers.specs.spec import IMPLEMENTATION, Spec

ACTIVATION_NAMES = (
    "linear",
    "relu",
    "silu",
    "swish",
    "gelu",
    "gelu_exact",
    "sigmoid",
    "tanh",
)


@dataclass(frozen=True)
class MlpSpec(Spec):
    module = "maxtext.layers.mlp"

    hidden_dim: int
    activations: tuple[str, ...] = ("silu", "linear")  # their results are multiplied
    bias: bool = False
    fused: bool = field(default=False, metadata=IMPLEMENTATION)  # one weight for all branches
    dropout_rate: float = field(default=0.0, metadata=IMPLEMENTATION)
    float32: bool = field(default=False, metadata=IMPLEMENTATION)  # activations computed in float32
    limit: float | None = None  # of the branches' values, see `layers.mlp.combine`

    @property
    def branches(self) -> tuple[str, ...]:
        """The names of the input projections."""
        count = len(self.activations)
        return ("wi",) if self.fused or count == 1 else tuple(f"wi_{i}" for i in range(count))

    @property
    def is_gated(self) -> bool:
        """Whether it is act(gate) · up, without limits or float32, as fused kernels compute it."""
        gated = len(self.activations) == 2 and self.activations[1] == "linear"
        return gated and not (self.fused or self.float32) and self.limit is None


@dataclass(frozen=True)
class RouterSpec(Spec):
    module = "maxtext.layers.routers"

    experts: int
    topk: int
    # or sigmoid, or softmax_of_topk: the softmax over the logits of the selected experts
    score: str = "softmax"
    normalise: bool = False  # divide the scores of the selected experts by their sum
    scaling: float = 1.0
    # or logits: added to the logits; or selection: added to the scores for the selection only
    bias: str = "none"
    groups: int = 1  # of neighbouring experts; the selection is limited to `topk_groups` of them
    topk_groups: int = 1
    group_score: str = "top2"  # the sum of a group's two largest scores; or max
    # epsilon of an RMS norm of the router's input, with a learned scale over √E; None: no norm
    input_norm_epsilon: float | None = None
    expert_scale: bool = False  # a learned factor for each expert
    # logits from a float32 matmul in the highest precision
    float32: bool = field(default=False, metadata=IMPLEMENTATION)
    # for benchmarks: a fixed, balanced selection; the weights are still those of the scores
    random: bool = field(default=False, metadata=IMPLEMENTATION)


@dataclass(frozen=True)
class MoeSpec(Spec):
    module = "maxtext.layers.moe"

    router: RouterSpec
    hidden_dim: int  # of each expert
    activations: tuple[str, ...] = ("silu", "linear")
    bias: bool = False
    limit: float | None = None  # clips the branches, see `layers.mlp.combine`
    float32: bool = field(default=False, metadata=IMPLEMENTATION)  # activations computed in float32
    # the weighted sum over a token's experts computed in float32
    float32_sum: bool = field(default=True, metadata=IMPLEMENTATION)
    apply_router_weight_on_input: bool = False  # of the experts, instead of on their output
    shared: MlpSpec | None = None
    shared_gate: bool = False  # multiply the shared MLP's output by a sigmoid for each token
    method: str = field(default="sparse", metadata=IMPLEMENTATION)  # or dense, or dropping
    capacity_factor: float = field(default=1.0, metadata=IMPLEMENTATION)  # of dropping
    # of sparse: a bound on the sorted buffer
    buffer_factor: float | None = field(default=None, metadata=IMPLEMENTATION)
    # of sparse: use a grouped matmul kernel if there is one; false: jax.lax.ragged_dot
    grouped_kernel: bool = field(default=True, metadata=IMPLEMENTATION)
    # of sparse: gathers as the gradient of sorting; false: autodiff
    custom_sort_vjp: bool = field(default=True, metadata=IMPLEMENTATION)
    # of sparse: devices that share the experts all-gather tokens; false: all-to-all
    ring: bool = field(default=False, metadata=IMPLEMENTATION)
    # of sparse: gather weights over one mesh axis after the other
    two_stage_gather: bool = field(default=False, metadata=IMPLEMENTATION)
    # shard weights over fsdp by experts, not by the embedding
    experts_on_fsdp: bool = field(default=False, metadata=IMPLEMENTATION)
    # reports "load_balance_loss"
    balance_weight: float = field(default=0.0, metadata=IMPLEMENTATION)
    # reports "expert_load" [X], the number of tokens of each expert
    report_load: bool = field(default=False, metadata=IMPLEMENTATION)
