"""Logits and gradients of tiny models equal transformers' in float32, from the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.configs import load
from maxtext.configs.derive import Devices
from maxtext.models import make_template
from maxtext.trainers.losses import language_model_losses

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH, WIDTH, HEADS, KV_HEADS, HEAD, MLP, LAYERS = 160, 48, 64, 4, 2, 16, 144, 3
SIZES = [
    f"vocab_size={VOCABULARY}", f"max_target_length={LENGTH}", f"base_emb_dim={WIDTH}", f"base_num_query_heads={HEADS}",
    f"head_dim={HEAD}", f"base_num_decoder_layers={LAYERS}", "dtype=float32", "matmul_precision=highest",
    "attention=dot_product", "remat_policy=none",
]  # fmt: skip
SHARED = dict(
    vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=MLP, num_hidden_layers=LAYERS,
    num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD, max_position_embeddings=512,
    rms_norm_eps=1e-5, attn_implementation="eager",
)  # fmt: skip
GATED = [*SIZES, f"base_num_kv_heads={KV_HEADS}", f"base_mlp_dim={MLP}"]
LLAMA31 = dict(
    rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16)


def llama_weights(state):
    """transformers' names -> ours, as (path, array); torch keeps matrices as [out, in]."""
    for i in range(LAYERS):
        pre = f"model.layers.{i}."
        for ours, theirs, heads in (("query", "q", HEADS), ("key", "k", KV_HEADS), ("value", "v", KV_HEADS)):
            kernel = state[f"{pre}self_attn.{theirs}_proj.weight"].T.reshape(WIDTH, heads, HEAD)
            yield (i, "attention", ours, "kernel"), kernel
        yield (i, "attention", "out", "kernel"), state[f"{pre}self_attn.o_proj.weight"].T.reshape(HEADS, HEAD, WIDTH)
        for ours, theirs in (("wi_0", "gate"), ("wi_1", "up"), ("wo", "down")):
            yield (i, "mlp", ours, "kernel"), state[f"{pre}mlp.{theirs}_proj.weight"].T
        yield (i, "attention_norm", "scale"), state[f"{pre}input_layernorm.weight"]
        yield (i, "mlp_norm", "scale"), state[f"{pre}post_attention_layernorm.weight"]
    yield ("embedder", "embedding"), state["model.embed_tokens.weight"]
    yield ("final_norm", "scale"), state["model.norm.weight"]
    yield ("head", "kernel"), state["lm_head.weight"].T


def gpt2_weights(state):
    """GPT-2 keeps matrices as [in, out] and q, k, v side by side."""
    for i in range(LAYERS):
        pre = f"transformer.h.{i}."
        joined = state[f"{pre}attn.c_attn.weight"].reshape(WIDTH, 3, HEADS, HEAD)
        yield (i, "attention", "qkv", "kernel"), joined.swapaxes(1, 2)
        yield (i, "attention", "qkv", "bias"), state[f"{pre}attn.c_attn.bias"].reshape(3, HEADS, HEAD).swapaxes(0, 1)
        yield (i, "attention", "out", "kernel"), state[f"{pre}attn.c_proj.weight"].reshape(HEADS, HEAD, WIDTH)
        yield (i, "attention", "out", "bias"), state[f"{pre}attn.c_proj.bias"]
        for ours, theirs in (("wi", "c_fc"), ("wo", "c_proj")):
            yield (i, "mlp", ours, "kernel"), state[f"{pre}mlp.{theirs}.weight"]
            yield (i, "mlp", ours, "bias"), state[f"{pre}mlp.{theirs}.bias"]
        for ours, theirs in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
            yield (i, ours, "scale"), state[f"{pre}{theirs}.weight"]
            yield (i, ours, "bias"), state[f"{pre}{theirs}.bias"]
    yield ("embedder", "embedding"), state["transformer.wte.weight"]
    yield ("positions", "embedding"), state["transformer.wpe.weight"]
    yield ("final_norm", "scale"), state["transformer.ln_f.weight"]
    yield ("final_norm", "bias"), state["transformer.ln_f.bias"]


def nested(named, scanned):
    """Our tree from (path, array) pairs; layers stacked at axis 1 (or last) when scanned."""
    tree, layers = {}, {}
    for path, array in named:
        if isinstance(path[0], int):
            layers.setdefault(path[1:], []).append(np.asarray(array))
        else:
            put(tree, path, np.asarray(array))
    for path, arrays in layers.items():
        if scanned:
            put(tree, ("layers", 0, "blocks", 0, *path), np.stack(arrays, axis=min(1, arrays[0].ndim)))
        else:
            for i, array in enumerate(arrays):
                put(tree, ("layers", 0, "blocks", 0, i, *path), array)
    return tree


def put(tree, path, value):
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


CASES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}, GATED, llama_weights),
    "llama unrolled": ("LlamaConfig", "LlamaForCausalLM", {}, [*GATED, "scan_layers=false"], llama_weights),
    "llama 3.1": (
        "LlamaConfig", "LlamaForCausalLM", {"rope_parameters": LLAMA31},
        [*GATED, "rope_type=llama3.1", "rope_max_timescale=500000", "rope_factor=8",
         "original_max_position_embeddings=32"],
        llama_weights,
    ),
    "llama yarn": (
        "LlamaConfig", "LlamaForCausalLM", {"rope_parameters": YARN},
        [*GATED, "rope_type=yarn", "rope_factor=4", "original_max_position_embeddings=16", "rope_interleave=false",
         "rope_attention_scaling=true"],
        llama_weights,
    ),
    "llama linear rope": (
        "LlamaConfig", "LlamaForCausalLM", {"rope_parameters": dict(rope_type="linear", rope_theta=1e4, factor=4.0)},
        [*GATED, "rope_linear_scaling_factor=4"], llama_weights,
    ),
    "mistral": (
        "MistralConfig", "MistralForCausalLM", {"sliding_window": 12},
        [*GATED, "decoder_block=mistral", "sliding_window_size=12"], llama_weights,
    ),
    "gpt2": (
        "GPT2Config", "GPT2LMHeadModel",
        dict(n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_inner=MLP, n_positions=64, resid_pdrop=0, embd_pdrop=0,
             attn_pdrop=0),
        [*SIZES, f"base_num_kv_heads={HEADS}", f"base_mlp_dim={MLP}", "decoder_block=gpt3",
         "trainable_position_size=64", "mlp_activations=[gelu]", "logits_via_embedding=true",
         "normalize_embedding_logits=false", "fused_qkv=true",
         "enable_dropout=false"],
        gpt2_weights,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=CASES)
def pair(request):
    """(our config, our weights, converter, their model, ids)"""
    config_class, model_class, extra, words, convert = CASES[request.param]
    torch.manual_seed(0)
    shared = (
        dict(SHARED) if config_class != "GPT2Config" else {"vocab_size": VOCABULARY, "attn_implementation": "eager"}
    )
    theirs = getattr(transformers, model_class)(getattr(transformers, config_class)(**(shared | extra))).float().eval()
    with torch.no_grad():  # biases and norms start at 0 and 1; move them so that a slip would show
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    config = load(None, words, environ={}, devices=Devices(1))
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (2, LENGTH + 1))
    return config, convert, theirs, ids


def numpy_state(model):
    return {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}


def positions():
    return jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH))


def test_logits(pair):
    config, convert, theirs, ids = pair
    template = make_template(config)
    weights = nested(convert(numpy_state(theirs)), config.scan_layers)
    assert jax.tree.map(lambda a: a.shape, weights) == jax.tree.map(lambda a: a.shape, template.weights)
    with jax.default_matmul_precision("highest"):
        model = template.bind(weights)
        ours = model(jnp.asarray(ids[:, :-1]), positions())
    expected = theirs(input_ids=torch.tensor(ids[:, :-1])).logits.detach().numpy()
    np.testing.assert_allclose(ours, expected, atol=2e-5 * expected.std(), rtol=2e-5)


def test_gradients(pair):
    """Of the mean cross-entropy, with respect to every weight."""
    config, convert, theirs, ids = pair
    template = make_template(config)
    weights = nested(convert(numpy_state(theirs)), config.scan_layers)
    inputs, targets = ids[:, :-1], ids[:, 1:]
    ones = np.ones_like(inputs)
    batch = {
        "inputs": inputs, "inputs_position": positions(), "inputs_segmentation": ones, "targets": targets,
        "targets_position": positions(), "targets_segmentation": ones,
    }  # fmt: skip
    batch = jax.tree.map(lambda field: jnp.asarray(field, jnp.int32), batch)

    def loss(weights):
        return language_model_losses(config, template, weights, batch, None).sums["lm_loss"] / inputs.size

    with jax.default_matmul_precision("highest"):
        ours = jax.jit(jax.grad(loss))(weights)
    theirs.zero_grad()
    logits = theirs(input_ids=torch.tensor(inputs)).logits
    torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), torch.tensor(targets).reshape(-1)).backward()
    gradients = {name: tensor.grad.numpy() for name, tensor in theirs.named_parameters()}
    expected = nested(convert(gradients), config.scan_layers)
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale, rtol=1e-4), ours, expected)
