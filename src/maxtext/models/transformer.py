"""The model: embed, run the layers, normalise, score the vocabulary."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from maxtext.common import hash_rng
from maxtext.common.errors import ConfigError
from maxtext.common.types import Json, Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.configs.types.enums import QuantizationType
from maxtext.layers.adapters import HEAD, AdapterSpec, adapter_inputs, use_adapter_inputs
from maxtext.layers.attention import ATTENTIONS
from maxtext.layers.cache import CacheConfig
from maxtext.layers.context import TRAIN, BuildContext, choose, describe_choices
from maxtext.layers.decoder_layer import BLOCKS
from maxtext.layers.embeddings import Embedding, Positions, build_embedding, sinusoids
from maxtext.layers.hyper_connections import collapse, expand
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.linear import Linear, build_linear, order_weight_grads, project
from maxtext.layers.lora import SavedCopies, freeze_base
from maxtext.layers.mlp import MLPS
from maxtext.layers.moe import MOES
from maxtext.layers.multi_token import MultiToken, MultiTokenSpec
from maxtext.layers.norms import Norm
from maxtext.layers.parameters import Initializer, Quantize, Template
from maxtext.layers.specs import AttentionSpec, LayerSpec, MlpSpec, MoeSpec, NormSpec
from maxtext.layers.stack import RESIDUAL_AXES, RematTensors, Stack
from maxtext.models.capabilities import find_specs
from maxtext.models.common import norm_spec
from maxtext.models.head_loss import HEAD_LOSSES, HeadSpec
from maxtext.models.registry import family, layers, segments
from maxtext.sharding import constrain
from maxtext.sharding.explicit import auto_sharded
from maxtext.sharding.rules import AxisRules

Caches = list[Tree]  # a cache for each layer
# The precision of matmuls, by `quantization`.
PRECISIONS = {"int8": "int8", "fp8": "fp8", "fp8_gpu": "fp8", "fp8_full": "fp8"}


class Transformer(nnx.Module):
    def __init__(
        self,
        config: MaxTextConfig,
        key: jax.Array | None,
        context: BuildContext,
        loop: bool = False,
        quantize: Quantize | None = None,
    ):
        initializer = Initializer(
            key=key,
            dtype=config.weight_dtype.value,
            init_scale=config.dense_init_scale,
            context=context,
            loop=loop,
            quantize=quantize,
        )
        self.context = context
        self.dtype = config.dtype.value
        self.embed_dim = config.emb_dim
        self.logit_dtype = "float32" if config.logits_dot_in_fp32 else self.dtype
        self.float32_logits = config.cast_logits_to_fp32
        self.logit_cap = config.final_logits_soft_cap or None
        self.logit_scale = config.architecture.logit_scale
        if config.logits_via_embedding and config.normalize_embedding_logits:
            self.logit_scale /= math.sqrt(config.emb_dim)
        self.num_labels = config.num_labels
        self.fixed_positions = config.use_untrainable_positional_embedding
        self.embedding_scale = (
            math.sqrt(config.emb_dim) if family(config).scaled_embedding else None
        )
        self.streams = config.mhc_expansion_rate

        uses_one_dtype = not config.logits_via_embedding or self.logit_dtype == self.dtype
        self.embedder = build_embedding(
            initializer.child("embedder"),
            config.vocab_size,
            self.embed_dim,
            self.dtype,
            config.use_iota_embed,
            cast_to=self.dtype if uses_one_dtype else None,
        )
        num_positions = config.trainable_position_size
        self.positions = (
            Positions(initializer.child("positions"), num_positions, self.embed_dim, self.dtype)
            if num_positions > 0
            else None
        )
        stacks, first = [], 0
        layer_initializer = initializer.child("layers")
        for segment in segments(config):
            stacks.append(
                Stack(
                    layer_initializer,
                    segment,
                    first_layer=first,
                    dtype=self.dtype,
                    scanned=config.scan_layers,
                    scan_axis=config.param_scan_axis,
                    remat=remat(config),
                    on_host=config.parameter_memory_host_offload,
                )
            )
            first += segment.layers
        self.layers = nnx.List(stacks)
        self.mtp = multi_token(config, initializer.child("mtp"), self.dtype)
        self.final_norm = Norm(initializer, final_norm(config), self.embed_dim, self.dtype)
        spec = head_spec(config)
        self.head = None if spec.tied else self.build_head(initializer, spec)
        head_shape = (spec.embed_dim, spec.vocab_size)
        self.head_copies = SavedCopies.of(context.adapters, HEAD, head_shape, initializer.dtype)
        self.head_loss = choose(HEAD_LOSSES, spec, context).implementation
        if context.adapters is not None:
            freeze_base(self, context.adapters)

    def build_head(self, initializer: Initializer, spec: HeadSpec) -> Linear:
        return build_linear(
            initializer,
            "head",
            in_shape=(spec.embed_dim,),
            out_shape=(spec.vocab_size,),
            axes=("embed_vocab", "vocab" if self.num_labels == 0 else None),
            dtype=spec.dtype,
            exact=spec.exact and not self.context.quantized_weights,
        )

    def __call__(
        self, inputs: jax.Array, positions: jax.Array, segments: jax.Array | None = None
    ) -> jax.Array:
        """Token ids [B, S] to logits [B, S, V]."""
        return self.run_logits(inputs, LayerInputs(positions, segments))

    def run_logits(self, ids: jax.Array, inputs: LayerInputs) -> jax.Array:
        """Token ids [B, S] to logits [B, S, V], with the adapters of the inputs."""
        x, _ = self.hidden(ids, inputs)
        with use_adapter_inputs(inputs):
            return self.logits(x)

    def hidden(self, ids: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, dict]:
        """Token ids [B, S] to the normed output of the last layer [B, S, E], and what the layers
        report.
        """
        x, reports = self.run(ids, inputs)
        return self.final_norm(x), reports

    def run(self, ids: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, dict]:
        """The output of the last layer, and {"layers": {segment: {"blocks": {place: {name:
        [repeats, ...]}}}}}.
        """
        graph, state = nnx.split((self.embedder, self.positions))
        with use_adapter_inputs(inputs):
            x = auto_sharded(
                lambda state, ids, positions: self.enter(*nnx.merge(graph, state), ids, positions),
                state,
                ids,
                inputs.positions,
                out_axes=RESIDUAL_AXES[3 if self.streams == 1 else 4],
            )
        inputs = replace(inputs, tokens=ids)
        reports = {}
        for number, stack in enumerate(self.layers):
            x, report = stack(x, inputs)
            reports[number] = {"blocks": report}
        if self.streams > 1:
            x = auto_sharded(collapse, x, out_axes=RESIDUAL_AXES[3])
        return x, {"layers": reports}

    def step(
        self, ids: jax.Array, inputs: LayerInputs, caches: Caches, taps: Sequence[int] = ()
    ) -> tuple[jax.Array, Caches, jax.Array | None]:
        """As `hidden`, for tokens that follow those in the caches, one a layer; the caches with
        them; and the residuals after these numbers of layers, one after the other, [B, S, n E].
        """
        with use_adapter_inputs(inputs):
            x = self.enter(self.embedder, self.positions, ids, jnp.maximum(inputs.positions, 0))
        inputs = replace(inputs, tokens=ids)
        after: Caches = []
        residuals = [x]
        for stack in self.layers:
            own = caches[len(after) : len(after) + stack.segment.layers]
            outputs, extended = stack.step(residuals[-1], inputs, own)
            residuals += outputs
            after += extended
        if self.streams > 1:
            residuals = [collapse(x) for x in residuals]
        tapped = jnp.concatenate([residuals[count] for count in taps], axis=-1) if taps else None
        return self.final_norm(residuals[-1]), after, tapped

    def enter(
        self,
        embedder: Embedding,
        position_embedding: Positions | None,
        ids: jax.Array,
        positions: jax.Array,
    ) -> jax.Array:
        """The input of the first layer."""
        x = self.scaled(embedder(ids))
        if position_embedding is not None:
            x = x + position_embedding(positions)
        if self.fixed_positions:
            x = x + sinusoids(positions, self.embed_dim, self.dtype)
        return x if self.streams == 1 else expand(x, self.streams)

    def mtp_input(self, x: jax.Array) -> jax.Array:
        """The input of the first MTP layer, of the output of the last layer."""
        assert self.mtp is not None
        return self.final_norm(x) if self.mtp.reads_normed else x

    def embed(self, ids: jax.Array) -> jax.Array:
        return self.scaled(self.embedder(ids))

    def scaled(self, x: jax.Array) -> jax.Array:
        return x if self.embedding_scale is None else x * jnp.asarray(self.embedding_scale, x.dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """[..., E] to [..., V]."""
        logits = self.project_logits(x)
        if self.float32_logits:
            logits = logits.astype(jnp.float32)
        return (
            logits if self.logit_cap is None else self.logit_cap * jnp.tanh(logits / self.logit_cap)
        )

    def project_logits(self, x: jax.Array) -> jax.Array:
        """The logits of the head, before the soft cap."""
        x = x.astype(self.logit_dtype)
        if x.ndim == 3:
            x = constrain(
                x, "activation_embed_and_logits_batch", "activation_length", "activation_embed"
            )
        if self.head is not None:
            [logits] = project(x, self.head, weight_grads_first=True)
        else:
            x, table = order_weight_grads(x, self.embedder.embedding[...].astype(self.logit_dtype))
            logits = x @ table.T
        if self.head_copies is not None:
            logits = self.head_copies.select(
                logits, adapter_inputs().ids, lambda weight: x @ weight.astype(x.dtype)
            )
        if self.logit_scale != 1:
            logits = logits * self.logit_scale
        if x.ndim == 3:
            logits = constrain(
                logits, "activation_embed_and_logits_batch", "activation_length", "activation_vocab"
            )
        return logits

    def scores(self, x: jax.Array) -> jax.Array:
        """[..., E] to [..., num_labels], of a model with such a head."""
        assert self.head is not None
        [scores] = project(x.astype(self.logit_dtype), self.head)
        return scores

    def losses(self, x: jax.Array, targets: jax.Array, tiles: int) -> tuple[jax.Array, jax.Array]:
        """`tiled_cross_entropy` of the logits of x [B, S, E]."""
        return self.head_loss.run(self, x, targets, tiles)


def empty_caches(config: MaxTextConfig, cache_config: CacheConfig) -> Caches | None:
    """One a layer; None: some layer recomputes all tokens."""
    caches = []
    for layer in layers(config):
        if not isinstance(layer, LayerSpec) or layer.engram is not None:
            return None
        cache = layer.attention.cache(cache_config)
        if cache is None:
            return None
        caches.append(cache)
    return caches


def head_spec(config: MaxTextConfig) -> HeadSpec:
    quantization = config.quantization.value if config.quantization else ""
    return HeadSpec(
        embed_dim=config.emb_dim,
        vocab_size=config.num_labels or config.vocab_size,
        dtype="float32" if config.logits_dot_in_fp32 else config.dtype.value,
        exact=quantization != "fp8_full",
        tied=config.logits_via_embedding and not config.num_labels,
        capped=bool(config.final_logits_soft_cap),
        scaled=config.architecture.logit_scale != 1,
    )


def final_norm(config: MaxTextConfig) -> NormSpec:
    """The last norm is of the layers' kind; layers without norms get a plain one."""
    return getattr(layers(config)[-1], "norm", None) or norm_spec(config)


def multi_token(
    config: MaxTextConfig, initializer: Initializer, dtype: DTypeLike
) -> MultiToken | None:
    """Layers like the last one that predict further tokens."""
    if not config.mtp_num_layers:
        return None
    spec = MultiTokenSpec(
        config.mtp_num_layers,
        mtp_block(config),
        final_norm(config),
        streams=config.mhc_expansion_rate,
        reads_normed=config.architecture.mtp_reads_normed,
    )
    return spec.build(initializer, config.emb_dim, dtype, remat(config))


def mtp_block(config: MaxTextConfig) -> Any:
    """The specification of the block in each layer for multi-token prediction."""
    return replace(layers(config)[-1], engram=None)


def remat(config: MaxTextConfig) -> RematTensors | None:
    if config.tensors_on_device is None or config.tensors_to_offload is None:
        return None
    return RematTensors(tuple(config.tensors_on_device), tuple(config.tensors_to_offload))


def build_context(
    config: MaxTextConfig,
    rules: AxisRules | None = None,
    mode: str = TRAIN,
    quantized_weights: str = "",
    decode_rows: int = 0,
    adapters: AdapterSpec | None = None,
) -> BuildContext:
    """The context of a configuration on the devices of a mesh; without one, on any device.

    Models with adapters multiply in the dtype of the activations."""
    quantization = config.quantization.value if config.quantization else ""
    options: Json = {
        "mode": mode,
        "dtype": config.dtype.value,
        "weight_dtype": config.weight_dtype.value,
        "precision": "" if quantized_weights or adapters else PRECISIONS.get(quantization, ""),
        "quantized_weights": quantized_weights,
        "scanned": config.scan_layers,
        "decode_rows": decode_rows,
        "adapters": adapters,
    }
    return BuildContext(**options) if rules is None else BuildContext.from_rules(rules, **options)


def refuse_absent_kernels(config: MaxTextConfig, context: BuildContext) -> None:
    """Raise ConfigError for a key that turns off a kernel which these devices do not have."""
    if config.megablox or not config.source("megablox").is_user:
        return
    gpu = f"a GPU of compute capability {context.capability or 'unknown'}"
    reasons = {
        f"on {gpu if context.platform == 'gpu' else 'a ' + context.platform.upper()}": (
            context.platform == "gpu" and context.capability == "9.0"
        ),
        f"on {context.num_devices} devices": context.num_devices == 1,
        f"in {context.dtype}": context.dtype == "bfloat16",
    }
    reason = next((reason for reason, fits in reasons.items() if not fits), None)
    if reason is not None:
        raise ConfigError(
            f"megablox=false ({config.source('megablox')}) would do nothing {reason}: the kernel "
            "that it turns off is for one NVIDIA Hopper GPU and bfloat16; jax.lax.ragged_dot runs "
            "in its place, so leave the key out"
        )


def make_template(config: MaxTextConfig, context: BuildContext | None = None) -> Template:
    """The abstract model of a configuration. Without a context it has the parameters that
    checkpoints have, and the reference implementations."""
    context = build_context(config) if context is None else context
    return Template.of(lambda: Transformer(config, None, context))


def implementations(config: MaxTextConfig, context: BuildContext) -> dict[str, str]:
    """Which implementations the parts of the model have in this context, and why no faster ones."""
    specs = [layer for layer in layers(config) if isinstance(layer, LayerSpec)]
    attention = [layer.attention for layer in specs if isinstance(layer.attention, AttentionSpec)]
    mlps = [layer.mlp for layer in specs if isinstance(layer.mlp, MlpSpec)]
    experts = list(find_specs(layers(config), MoeSpec))
    parts: dict[str, tuple[Sequence[Any], list[Any]]] = {"layers": (BLOCKS, specs)}
    if context.mode == TRAIN:
        parts["head loss"] = (HEAD_LOSSES, [head_spec(config)])
    else:
        parts |= {
            "attention": (ATTENTIONS, attention),
            "MLP": (MLPS, mlps),
            "experts": (MOES, experts),
        }
    described = {
        part: describe_choices([choose(table, spec, context) for spec in part_specs])
        for part, (table, part_specs) in parts.items()
        if part_specs
    }
    if context.quantized_weights and context.mode != TRAIN:
        reason = context.eight_bit_unsupported_reason()
        rows = "quantized from 17 rows on" if reason is None else f"not quantized ({reason})"
        described["weights"] = f"{context.quantized_weights}; activations are {rows}"
    if config.quantization == QuantizationType.MXFP4 and context.mode != TRAIN:
        described["weights"] = "experts in mxfp4"
    return described


def initial_weights(
    config: MaxTextConfig,
    loop: bool = False,
    context: BuildContext | None = None,
    quantize: Quantize | None = None,
) -> Tree:
    """Fresh weights as a nested dict; to be called under jit, so that they are born where they
    belong. `loop` and `quantize` are as in `Initializer`. `context`: default, that of a model as
    checkpoints have it."""
    key = hash_rng.key_from_seed(config.init_weights_seed)
    context = build_context(config) if context is None else context
    return nnx.to_pure_dict(nnx.state(Transformer(config, key, context, loop, quantize)))
