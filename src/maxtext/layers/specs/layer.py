"""The spec of a decoder layer, and the patterns of specs that repeat in a model.

Also the specs of MLPs, mixtures of experts, Gated DeltaNet and n-gram memories (Engram).
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from maxtext.layers.specs.spec import IMPLEMENTATION, MixerSpec, NormSpec, Spec

LAYER_SEED = 10007  # the difference between the seeds of consecutive layers


class Compression:
    """The compressed id of every token id. Compared and hashed by value, for specs that hold
    one.
    """

    def __init__(self, ids: np.ndarray):
        self.ids = np.ascontiguousarray(ids, np.int32)
        self.ids.flags.writeable = False
        self.size = int(self.ids.max()) + 1
        self.digest = hashlib.sha256(self.ids.tobytes()).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Compression) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True)
class EngramSpec(Spec):
    module = "maxtext.layers.engram"

    heads: int  # for each order
    head_dim: int  # of a row of the table: one order, one head
    vocabulary_bases: tuple[int, ...]  # minimum rows of a head, for each order 2..max_ngram
    max_ngram: int
    kernel_size: int
    seed: int
    layer: int  # its index in the model
    vocabulary: int  # number of token ids
    norm: NormSpec  # rms
    layers: tuple[int, ...] = ()  # all Engram layers, whose primes all differ; empty: only this
    streams: int = 1  # residual streams
    pad: int = 0  # the token id before the start of a document
    compression: Compression | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.max_ngram < 2 or len(self.vocabulary_bases) != self.max_ngram - 1:
            raise ValueError(
                f"{len(self.vocabulary_bases)} vocabulary_bases for n-grams of 2 to "
                f"{self.max_ngram} tokens"
            )
        if self.layers and self.layer not in self.layers:
            raise ValueError(
                f"layer {self.layer} is not among the layers with a memory, {self.layers}"
            )
        if self.norm.kind != "rms":
            raise ValueError(f"Engram norms with rms, not {self.norm.kind}")
        if sum(self.primes) >= 2**31:
            raise ValueError(f"a memory of {sum(self.primes)} rows; indices have 31 bits")

    @cached_property
    def primes(self) -> tuple[int, ...]:
        """[N]: the rows of each head, order by order."""
        layers = self.layers or (self.layer,)
        return head_primes(self.vocabulary_bases, self.heads, len(layers))[layers.index(self.layer)]

    @cached_property
    def multipliers(self) -> tuple[int, ...]:
        """Odd, one for each token of an n-gram; products with ids stay below 2⁶³."""
        vocabulary = self.compression.size if self.compression else self.vocabulary
        half = max(1, (2**63 - 1) // vocabulary // 2)
        draw = np.random.default_rng(self.seed + LAYER_SEED * self.layer).integers(
            0, half, self.max_ngram, np.int64
        )
        return tuple(2 * int(value) + 1 for value in draw)

    @property
    def memory_dim(self) -> int:
        """The dimension of all rows of a token."""
        return len(self.primes) * self.head_dim


@lru_cache
def head_primes(bases: tuple[int, ...], heads: int, layers: int) -> tuple[tuple[int, ...], ...]:
    """For each layer, order by order, the rows of each head: the first unused primes from the base
    on.
    """
    used: set[int] = set()
    layer_primes = []
    for _ in range(layers):
        primes = []
        for base in bases:
            candidate = base
            for _ in range(heads):
                while candidate in used or not is_prime(candidate):
                    candidate += 1
                used.add(candidate)
                primes.append(candidate)
        layer_primes.append(tuple(primes))
    return tuple(layer_primes)


def is_prime(number: int) -> bool:
    if number < 4 or number % 2 == 0:
        return number in (2, 3)
    return all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2))


FORMS = ("chunked", "recurrent")


@dataclass(frozen=True)
class GatedDeltaNetSpec(MixerSpec):
    module = "maxtext.layers.gated_delta_net"

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    chunk: int = field(metadata=IMPLEMENTATION)  # tokens of a chunk in the chunked form
    norm_epsilon: float
    qk_norm: bool = True  # L2-normalise queries and keys
    # or recurrent, token by token, with the same result
    form: str = field(default="chunked", metadata=IMPLEMENTATION)

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, not {self.form}")
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"{self.value_heads} value heads are not a multiple of {self.key_heads} key heads"
            )

    @property
    def group_size(self) -> int:
        """Value heads for each key head."""
        return self.value_heads // self.key_heads


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


MAX_PATTERN_LENGTH = 16


@dataclass(frozen=True)
class HyperConnectionSpec(Spec):
    module = "maxtext.layers.hyper_connections"

    streams: int  # k, at least 2: one stream is the ordinary residual
    sinkhorn_iterations: int  # normalisations of rows and columns
    norm: NormSpec  # rms

    def __post_init__(self) -> None:
        if self.streams < 2:
            raise ValueError(f"hyper-connections need at least 2 streams, not {self.streams}")
        if self.sinkhorn_iterations < 1:
            raise ValueError(
                f"sinkhorn_iterations must be at least 1, not {self.sinkhorn_iterations}"
            )
        if self.norm.kind != "rms":
            raise ValueError(f"hyper-connections need an rms norm, not {self.norm.kind}")


@dataclass(frozen=True)
class LayerSpec(Spec):
    """`attention` and `mlp` are the specs of any sublayers."""

    module = "maxtext.layers.decoder_layer"

    embed_dim: int
    attention: Any
    mlp: Any
    norm: NormSpec
    parallel: bool = False  # attention and MLP have the same normed input
    attention_norm: bool = True  # a norm on the input of attention
    mlp_norm: bool = True
    post_attention_norm: bool = False  # a norm on the output of attention, before it is added
    post_mlp_norm: bool = False
    scaled: bool = False  # the layer's output times a stored factor that is not trained
    dropout_rate: float = field(default=0.0, metadata=IMPLEMENTATION)
    streams: HyperConnectionSpec | None = None
    engram: EngramSpec | None = None  # a memory of n-grams, added before attention


@dataclass(frozen=True)
class Segment:
    pattern: tuple[Spec, ...]
    repeats: int

    @property
    def layers(self) -> int:
        return len(self.pattern) * self.repeats


def segments_of(layers: Sequence[Spec], cycle: int = 1) -> list[Segment]:
    """The layers as repeating patterns: from each position the pattern that covers most of the
    rest, the shortest of equals. A pattern whose length divides `cycle` is repeated to that length,
    which is what a step of the scan runs."""
    segments, start = [], 0
    while start < len(layers):
        rest = layers[start:]
        best = (1, 1)  # length, repeats
        for length in range(1, min(MAX_PATTERN_LENGTH, len(rest) // 2) + 1):
            repeats = 1
            while rest[repeats * length : (repeats + 1) * length] == rest[:length]:
                repeats += 1
            if repeats > 1 and length * repeats > best[0] * best[1]:
                best = (length, repeats)
        length, repeats = best
        factor = cycle // length if cycle % length == 0 else 1
        if 1 < factor <= repeats:
            length, repeats = cycle, repeats // factor
        segments.append(Segment(tuple(rest[:length]), repeats))
        start += length * repeats
    return segments
