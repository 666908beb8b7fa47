"""Specs of softmax attention and of multi-head latent attention (MLA)."""

from dataclasses import dataclass, field

from maxtext.common.errors import ConfigError
from maxtext.kernels.attention_options import AttentionMask, BlockSizes
from maxtext.layers.specs.spec import IMPLEMENTATION, MixerSpec, NormSpec, RopeSpec, Spec


@dataclass(frozen=True)
class Temperature:
    """Scales a query by 1 + scale · ln(floor((position + 1) / length) + 1)."""

    scale: float = 0.1
    length: int = 8192


@dataclass(frozen=True)
class Moba:
    """Each query attends to the `top` chunks of keys with the highest gate, its own among them."""

    chunk: int
    top: int


@dataclass(frozen=True)
class AttentionSpec(MixerSpec):
    module = "maxtext.layers.attention"

    query_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    mask: AttentionMask
    rope: RopeSpec | None = None
    bias: bool = False  # of queries, keys and values
    out_bias: bool = False
    # one weight for queries, keys and values
    fused: bool = field(default=False, metadata=IMPLEMENTATION)
    shared_kv: bool = False  # values are the projected keys, before norm and RoPE
    # The output of a head is multiplied by the sigmoid of a gate, which is projected as its query.
    gated: bool = False
    qk_norm: NormSpec | None = None
    # head: each head before RoPE; scaled_head: with a scale for each head; heads: all heads of a
    # token jointly; rotated: each head after RoPE
    qk_norm_over: str = "head"
    value_norm: NormSpec | None = None
    temperature: Temperature | None = None
    moba: Moba | None = None
    soft_cap: float | None = None
    sinks: bool = False
    output_dim: int | None = None  # None: as wide as the input
    backend: str = field(default="dot_product", metadata=IMPLEMENTATION)
    float32_product: bool = field(default=False, metadata=IMPLEMENTATION)
    float32_logits: bool = field(default=False, metadata=IMPLEMENTATION)
    blocks: BlockSizes | None = field(default=None, metadata=IMPLEMENTATION)
    # decode steps must use the kernel for paged attention; false: where it is supported
    requires_paged_kernel: bool = field(default=False, metadata=IMPLEMENTATION)
    # tokens that this kernel reads at a time; None: its default
    paged_kernel_block: int | None = field(default=None, metadata=IMPLEMENTATION)

    @property
    def head_dims(self) -> tuple[int, int, int, int]:
        """The number of query heads and of key/value heads, the head dim of keys and of values."""
        return self.query_heads, self.kv_heads, self.head_dim, self.head_dim

    @property
    def has_selection(self) -> bool:
        """Whether each query attends to selected keys."""
        return self.moba is not None

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """The output shape of each projection of the input, if they are separate."""
        shapes = {"query": (self.query_heads, self.head_dim), "key": (self.kv_heads, self.head_dim)}
        return shapes if self.shared_kv else shapes | {"value": shapes["key"]}

    @property
    def fused_rope_unsupported_reason(self) -> str | None:
        """Why kernels that fuse RoPE into the projections do not support this attention: they apply
        it to whole heads, and nothing else. None if they do."""
        rope = self.rope
        if rope is None or rope.interleave or rope.rotated(self.head_dim) != self.head_dim:
            return "needs RoPE over whole heads, not interleaved"
        others = (self.fused, self.bias, self.shared_kv, self.qk_norm, self.value_norm, self.moba)
        return "needs projections without norms and biases" if any(others) else None

    @property
    def split_qkv_unsupported_reason(self) -> str | None:
        """Why the kernel that splits packed projections, with norms and RoPE, does not support this
        attention; None if it does."""
        if self.fused or self.moba is not None:
            return "needs packed projections of softmax attention"
        norms = [norm for norm in (self.qk_norm, self.value_norm) if norm is not None]
        if any(norm.kind != "rms" for norm in norms) or self.qk_norm_over == "heads":
            return "needs RMS norms of single heads"
        return None


@dataclass(frozen=True)
class IndexerSpec(Spec):
    module = "maxtext.layers.indexer"

    heads: int
    head_dim: int
    rope_dim: int  # the first dimensions of a head, to which RoPE is applied
    rope: RopeSpec
    topk: int  # keys that a query selects; all, if there are no more
    # the loss is over the selected keys; false: dense warm-up, if there is a loss
    sparse_training: bool = field(default=False, metadata=IMPLEMENTATION)
    loss_factor: float = field(default=0.0, metadata=IMPLEMENTATION)  # 0: no loss

    @property
    def is_sparse(self) -> bool:
        """Whether attention is sparse: always, but for the dense warm-up."""
        return self.sparse_training or self.loss_factor == 0


@dataclass(frozen=True)
class MlaSpec(MixerSpec):
    module = "maxtext.layers.mla"

    heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float  # of the logits, including YaRN's correction
    rope: RopeSpec
    norm: NormSpec  # of both latents
    mask: AttentionMask
    query_rank: int = 0  # 0: no query latent
    bias: bool = False  # of the projections to the latents and of the output
    soft_cap: float | None = None
    latent: bool = field(default=False, metadata=IMPLEMENTATION)
    indexer: IndexerSpec | None = None
    # reports "max_logits" [H], the largest logit of each head
    report_max_logits: bool = field(default=False, metadata=IMPLEMENTATION)
    backend: str = field(default="dot_product", metadata=IMPLEMENTATION)
    float32_product: bool = field(default=False, metadata=IMPLEMENTATION)
    float32_logits: bool = field(default=False, metadata=IMPLEMENTATION)
    blocks: BlockSizes | None = field(default=None, metadata=IMPLEMENTATION)

    def __post_init__(self) -> None:
        if self.indexer and not self.query_rank:
            raise ConfigError(
                "The indexer reads the query latent, so it needs q_lora_rank above 0."
            )

    @property
    def head_dims(self) -> tuple[int, int, int, int]:
        """The number of query heads and of key/value heads, the head dim of keys and of values."""
        if self.latent:
            return self.heads, 1, self.kv_rank + self.rope_dim, self.kv_rank
        return self.heads, self.heads, self.nope_dim + self.rope_dim, self.value_dim

    @property
    def sinks(self) -> bool:
        return False

    @property
    def has_selection(self) -> bool:
        """Whether each query attends to selected keys."""
        return self.indexer is not None
