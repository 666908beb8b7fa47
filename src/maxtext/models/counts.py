"""Parameter and FLOP counts of a model.

Logits count, the embedding look-up does not; a training step of all weights is three forward
passes; rematerialization is not counted.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import jax

from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.models.flops import layer_flops
from maxtext.models.registry import layers

# The parts of a model, by the names in the path of a weight; the first part that has one of them
# counts it. The order of the result is that of PART_ORDER.
PARTS: dict[str, tuple[str, ...]] = {
    "n-gram memory": ("engram",),
    "hyper-connections": ("attention_streams", "mlp_streams"),
    "norms": ("norm",),  # and whatever ends in _norm
    "embedding": ("embedder", "positions"),
    "output head": ("head",),
    "experts": ("experts",),
    "shared experts": ("shared", "shared_gate"),
    "routers": ("router",),
    "attention": ("attention",),
    "mlp": ("mlp", "widen", "products"),
}


PART_ORDER = (
    "embedding",
    "attention",
    "mlp",
    "experts",
    "shared experts",
    "routers",
    "norms",
    "hyper-connections",
    "n-gram memory",
    "output head",
    "other",
)


# The names of parameters that multiply activations, and the parts whose parameters do not.
MATRICES = ("weight", "lora_a", "lora_b")
NOT_MULTIPLIED = ("embedding", "norms", "n-gram memory", "hyper-connections")


def parameter_count(weights: Tree) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights))


def active_count(config: MaxTextConfig, weights: Tree) -> int:
    """The parameters that a token uses: of the experts, those chosen for it; all others in full,
    embedding and output head included."""
    parts = breakdown(weights)
    experts = parts.pop("experts", 0)
    return sum(parts.values()) + experts * config.num_experts_per_tok // config.num_experts


def breakdown(weights: Tree) -> dict[str, int]:
    """Parameters by part, for the parts that the model has."""
    counts: dict[str, int] = {}
    for path, leaf in jax.tree.leaves_with_path(weights):
        part = part_of([str(step.key) for step in path])
        counts[part] = counts.get(part, 0) + math.prod(leaf.shape)
    return {part: counts[part] for part in PART_ORDER if part in counts}


def part_of(path: Sequence[str]) -> str:
    names = {"norm" if name.endswith("_norm") else name for name in path}
    # Engrams and hyper-connections have norms and projections of their own, so they come first.
    return next((part for part, keys in PARTS.items() if names.intersection(keys)), "other")


def forward_flops_per_token(config: MaxTextConfig, length: int | None = None) -> float:
    length = length or config.max_target_length
    specs = layers(config)
    head = 2 * config.emb_dim * config.vocab_size
    flops = sum(layer_flops(spec, length) for spec in specs) + head
    if config.mtp_num_layers:
        # A layer like the last without its engram, a projection, and the head again.
        block = layer_flops(replace(specs[-1], engram=None), length)
        flops += config.mtp_num_layers * (block + 4 * config.emb_dim**2 + head)
    return flops


def train_flops_per_token(
    config: MaxTextConfig, frozen: Tree | None = None, adapters: Tree | None = None
) -> float:
    """FLOPs of a training step: 3 F - W(frozen) + 3 W(adapters).

    F are the FLOPs of a forward pass, W those of one product with each of the given matrices. The
    backward pass computes the gradients of the activations, as many FLOPs as the forward pass, and
    those of the weights, which frozen matrices do not have. `frozen`: the weights that are not
    trained; `adapters`: low-rank matrices, which F does not count and which are trained.
    """
    flops = 3 * forward_flops_per_token(config) - weight_flops_per_token(config, frozen)
    return flops + 3 * weight_flops_per_token(config, adapters)


def weight_flops_per_token(config: MaxTextConfig, weights: Tree) -> float:
    """FLOPs of the products of a token with matrices, 2 for each weight that it uses: of routed
    experts those chosen for it, and of embeddings none, unless the embedding is the head."""
    flops = 0.0
    for path, leaf in jax.tree.leaves_with_path(weights):
        names = [str(step.key) for step in path]
        part = part_of(names)
        is_head = part == "embedding" and names[-1] == "embedding" and config.logits_via_embedding
        is_matrix = names[-1] in MATRICES and part not in NOT_MULTIPLIED
        if is_head or is_matrix:
            share = config.num_experts_per_tok / config.num_experts if part == "experts" else 1.0
            flops += 2 * share * math.prod(leaf.shape)
    return flops
