"""Multi-token prediction (MTP, DeepSeek-V3): extra layers, each of which predicts one token
further.

With h_0 the output of the model's last layer, before the final norm, and for k = 1..K

    h_k[t] = Block_k(W_k [RMSNorm(embedding of token t+k) ; RMSNorm(h_(k-1)[t])])
    the model's head over RMSNorm(h_k[t]) predicts token t+1+k, where the model itself predicts t+1

Embedding and head are shared with the model; the three norms, W_k and the block belong to layer k,
as in the released weights (enorm, hnorm, shared_head.norm, eh_proj). Those weights take the
embedding first, unlike equation 21 of the report, and the models in Hugging Face folders are run
with `reads_normed`: h_0 is after the model's final norm, and h_k after that of layer k.

If token t+k is after the end of the row or in another document, id 0 is embedded; `mtp_targets`
masks these positions in the loss, which is the mean over all positions of all K layers:

    loss += mtp_loss_scaling_factor · Σ_k Σ_t mask · cross entropy / Σ_k Σ_t mask

Shapes: B batch, S sequence, E embed_dim.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from maxtext.layers.hyper_connections import collapse, expand
from maxtext.layers.inputs import Aux, LayerInputs
from maxtext.layers.linear import build_linear
from maxtext.layers.norms import Norm
from maxtext.layers.parameters import Initializer
from maxtext.layers.specs import NormSpec, Spec
from maxtext.layers.stack import RematTensors
from maxtext.sharding import constrain


@dataclass(frozen=True)
class MultiTokenSpec:
    layers: int  # K
    block: Spec  # of each layer: its module maps (x, inputs) to (x, Aux)
    norm: NormSpec
    streams: int = 1  # residual streams of the block (hyper-connections), expanded and collapsed
    reads_normed: bool = False  # each h is after a norm

    def build(
        self,
        initializer: Initializer,
        embed_dim: int,
        dtype: DTypeLike,
        remat: RematTensors | None = None,
    ) -> "MultiToken":
        return MultiToken(initializer, self, embed_dim, dtype, remat)


class MultiToken(nnx.Module):
    def __init__(
        self,
        initializer: Initializer,
        spec: MultiTokenSpec,
        embed_dim: int,
        dtype: DTypeLike,
        remat: RematTensors | None = None,
    ):
        self.remat, self.reads_normed = remat, spec.reads_normed
        self.layers = nnx.List(
            [
                MultiTokenLayer(initializer.child(f"layer_{k}"), spec, embed_dim, dtype)
                for k in range(spec.layers)
            ]
        )

    def __call__(
        self,
        x: jax.Array,
        embed: Callable[[jax.Array], jax.Array],
        inputs: LayerInputs,
        tokens: jax.Array,
    ) -> tuple[list[jax.Array], Aux]:
        """From h_0 [B, S, E] and the input ids [B, S]: the input of the head for every k, [B, S,
        E], and the aux outputs of the blocks, [K, ...].

        `embed` maps ids to the input of the first layer. The RNG key of `inputs` must differ from
        the keys that the model's own layers fold.
        """
        outputs, reports = [], []
        for k, layer in enumerate(self.layers, start=1):
            ids = next_tokens(tokens, inputs.segments, k)
            graph, state = nnx.split(layer)

            def run(
                state: nnx.State,
                x: jax.Array,
                embedded: jax.Array,
                inputs: LayerInputs,
                graph: nnx.GraphDef = graph,
            ) -> tuple[jax.Array, jax.Array, Aux]:
                return nnx.merge(graph, state)(x, embedded, inputs)

            function = self.remat.wrap(run, in_scan=False) if self.remat else run
            x, output, aux = function(state, x, embed(ids), replace(inputs.fold(k), tokens=ids))
            outputs.append(output)
            reports.append(aux)
        return outputs, jax.tree.map(lambda *layers: jnp.stack(layers), *reports)


class MultiTokenLayer(nnx.Module):
    def __init__(
        self, initializer: Initializer, spec: MultiTokenSpec, embed_dim: int, dtype: DTypeLike
    ):
        self.streams, self.reads_normed = spec.streams, spec.reads_normed
        self.embedding_norm = Norm(initializer, spec.norm, embed_dim, dtype)
        self.hidden_norm = Norm(initializer, spec.norm, embed_dim, dtype)
        self.projection = build_linear(
            initializer,
            "projection",
            in_shape=(2 * embed_dim,),
            out_shape=(embed_dim,),
            axes=("embed", "mlp"),
            dtype=dtype,
        )
        self.block: Any = spec.block.build(initializer.child("block"), dtype)
        self.output_norm = Norm(initializer, spec.norm, embed_dim, dtype)

    def __call__(
        self, x: jax.Array, embedded: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, jax.Array, Aux]:
        """h_(k-1) -> h_k, and h_k normed for the head."""
        concatenated = jnp.concatenate(
            [self.embedding_norm(embedded), self.hidden_norm(x)], axis=-1
        )
        x = self.projection(concatenated)
        x = constrain(x, "activation_batch", "activation_norm_length", "activation_embed")
        is_decoding = inputs.cache is not None and x.shape[1] == 1
        block = self.block.decode if is_decoding else self.block
        if self.streams == 1:
            x, aux = block(x, inputs)
        else:
            x, aux = block(expand(x, self.streams), inputs)
            x = collapse(x)
        output = self.output_norm(x)
        return (output if self.reads_normed else x), output, aux


def shift_left(values: jax.Array, steps: int) -> jax.Array:
    """values [B, S, ...] of the position `steps` later, and 0 after the end of the row."""
    padding = [(0, 0), (0, steps), *[(0, 0)] * (values.ndim - 2)]
    return jnp.pad(values, padding)[:, steps:]


def next_tokens(tokens: jax.Array, segments: jax.Array | None, steps: int) -> jax.Array:
    """The ids [B, S] of the tokens `steps` later in the same document, and 0 after its end."""
    ids = shift_left(tokens, steps)
    return ids if segments is None else jnp.where(shift_left(segments, steps) == segments, ids, 0)


def mtp_targets(
    targets: jax.Array,
    targets_segmentation: jax.Array,
    inputs_segmentation: jax.Array,
    steps: int,
) -> tuple[jax.Array, jax.Array]:
    """The targets of layer `steps` [B, S], and the mask of the loss, bool [B, S].

    The mask is true if the target `steps` positions later is trained on (targets_segmentation is
    not 0) and in the document of this position. The target of this position itself need not be
    trained on: the first trained tokens of a turn follow a prompt.
    """
    in_document = shift_left(inputs_segmentation, steps) == inputs_segmentation
    is_learned = shift_left(targets_segmentation, steps) != 0
    return shift_left(targets, steps), in_document & is_learned


def count_accepted(
    main: jax.Array, drafts: jax.Array, mask: jax.Array, steps: int
) -> tuple[jax.Array, jax.Array]:
    """(number of accepted drafts, number of drafts), float32; their quotient is the acceptance
    rate.

    `main` and `drafts` are the most likely tokens [B, S] of the model itself and of layer `steps`,
    `mask` is that of `mtp_targets`. A draft is accepted if the model predicts the same token at its
    position.
    """
    mask = mask.astype(jnp.float32)
    return jnp.sum((shift_left(main, steps) == drafts) * mask), jnp.sum(mask)
