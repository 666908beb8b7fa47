"""No silent knobs: every acting key of the training groups changes the program of a training step, or of its start.

A key is shown to act by lowering the train step, as the trainer lowers it, with and without the key: the two StableHLO
texts differ. Where that cannot be (the loop or the data reads the key), the key is exempt here, with the test that
shows it elsewhere.
"""

import jax
import pytest

from maxtext.common.errors import ConfigError
from maxtext.configs import ledger, types
from maxtext.trainers.setup import Setup

GROUPS = (
    types.ModelArchitecture, types.DataTypes, types.Logits, types.Attention, types.Optimizer, types.AdamW, types.Muon,
    types.PositionalEmbedding, types.Rope, types.YarnRope, types.TrainingLoop, types.Llama4Attention, types.Qwen3Next,
    types.DeepSeekMoE,
)  # fmt: skip

# What a key is added to. A model's keys are shown under the smallest optimizer, an optimizer's on the smallest model.
PLAIN = ("opt_type=sgd", "gradient_clipping_threshold=0", "abort_on_nan_loss=false", "abort_on_inf_loss=false")
HALF = (*PLAIN, "dtype=bfloat16")
TIED = (*PLAIN, "logits_via_embedding=true")
CAPPED = (*HALF, "final_logits_soft_cap=5")
LLAMA31 = (*PLAIN, "rope_type=llama3.1", "original_max_position_embeddings=32")
YARN = (*PLAIN, "rope_type=yarn", "rope_factor=4")
NORMED = (*PLAIN, "use_qk_norm=true")
SHAKEN = (*PLAIN, "dropout_rate=0.5")
PRODUCTS = ("decoder_block=simple_mlp",)
WSD = (*PRODUCTS, "lr_schedule_type=wsd")
SKIPPING = (*PRODUCTS, "skip_step_on_spikes=true")
MUON = (*PRODUCTS, "opt_type=muon")

CASES = {
    # ModelArchitecture
    "decoder_block": ("default", PLAIN),
    "global_parameter_scale": ("2", PRODUCTS),
    "base_emb_dim": ("24", PRODUCTS),
    "base_num_query_heads": ("2", PLAIN),
    "base_num_kv_heads": ("4", PLAIN),
    "base_mlp_dim": ("48", PRODUCTS),
    "dense_init_scale": ("2", PRODUCTS),
    "base_num_decoder_layers": ("2", PRODUCTS),
    "head_dim": ("4", PLAIN),
    "mlp_activations": ("[gelu, linear]", PLAIN),
    "normalization_layer_epsilon": ("1e-3", PRODUCTS),
    "fused_qkv": ("true", PLAIN),
    "attention_bias": ("true", PLAIN),
    "fused_mlp": ("true", PLAIN),
    "qk_norm_with_scale": ("false", NORMED),
    # DataTypes
    "dtype": ("bfloat16", PRODUCTS),
    "grad_dtype": ("bfloat16", PRODUCTS),
    "weight_dtype": ("bfloat16", PRODUCTS),
    "matmul_precision": ("default", PRODUCTS),
    "activations_in_float32": ("true", HALF),
    # Logits
    "logits_via_embedding": ("true", PRODUCTS),
    "normalize_embedding_logits": ("false", TIED),
    "logits_dot_in_fp32": ("true", HALF),
    "cast_logits_to_fp32": ("false", CAPPED),  # the loss is float32 either way, what comes before it is not
    "final_logits_soft_cap": ("5", PRODUCTS),
    "z_loss_multiplier": ("0.1", PRODUCTS),
    # Attention
    "attention_type": ("full", PLAIN),
    "attention_sink": ("true", PLAIN),
    "float32_qk_product": ("true", HALF),
    "float32_logits": ("true", HALF),
    "sliding_window_size": ("4", (*PLAIN, "decoder_block=mistral")),
    "chunk_attn_window_size": ("4", (*PLAIN, "attention_type=chunk", "chunk_attn_window_size=8")),
    "attn_logits_soft_cap": ("5", PLAIN),
    "use_post_attn_norm": ("true", PLAIN),
    "use_post_ffw_norm": ("true", PLAIN),
    # Optimizer
    "opt_type": ("adam_pax", PRODUCTS),
    "skip_step_on_spikes": ("true", PRODUCTS),
    "skip_step_interval": ("7", SKIPPING),
    "skip_step_scaling_factor": ("3", SKIPPING),
    "gradient_accumulation_steps": ("2", PRODUCTS),
    "gradient_clipping_threshold": ("0.5", PRODUCTS),
    "learning_rate": ("0.5", PRODUCTS),
    "lr_schedule_type": ("wsd", PRODUCTS),
    "learning_rate_final_fraction": ("0.5", PRODUCTS),
    "wsd_decay_steps_fraction": ("0.5", WSD),
    "wsd_decay_style": ("cosine", WSD),
    "warmup_steps_fraction": ("0.5", PRODUCTS),
    "learning_rate_schedule_steps": ("77", PRODUCTS),
    "trainable_parameters_mask": ("[head]", PRODUCTS),
    # AdamW
    "adam_b1": ("0.5", PRODUCTS),
    "adam_b2": ("0.5", PRODUCTS),
    "adam_eps": ("1e-3", PRODUCTS),
    "adam_eps_root": ("1e-3", PRODUCTS),
    "adam_weight_decay": ("0.5", PRODUCTS),
    "adamw_mask": ("[head]", PRODUCTS),
    "mu_dtype": ("bfloat16", PRODUCTS),
    # Muon
    "muon_beta": ("0.5", MUON),
    "muon_weight_decay": ("0.5", MUON),
    "muon_consistent_rms": ("0.2", MUON),
    # PositionalEmbedding
    "use_iota_embed": ("true", PRODUCTS),
    "use_untrainable_positional_embedding": ("true", PRODUCTS),
    "trainable_position_size": ("16", PRODUCTS),
    "nope_layer_interval": ("1", PLAIN),
    # Rope
    "rope_type": ("yarn", PLAIN),
    "rope_use_scale": ("false", LLAMA31),
    "rope_min_timescale": ("2", PLAIN),
    "rope_max_timescale": ("500", PLAIN),
    "rope_linear_scaling_factor": ("2", PLAIN),
    # YarnRope
    "original_max_position_embeddings": ("64", YARN),
    "rope_factor": ("8", YARN),
    "beta_fast": ("2", YARN),
    "beta_slow": ("8", YARN),
    "rope_interleave": ("false", YARN),
    "rope_truncate": ("false", YARN),
    "rope_attention_scaling": ("true", YARN),
    # TrainingLoop
    "steps": ("60", PRODUCTS),
    "enable_dropout": ("false", SHAKEN),
    "dropout_rate": ("0.25", SHAKEN),
    "init_weights_seed": ("1", PRODUCTS),
    # Llama4Attention, Qwen3Next, DeepSeekMoE: keys that other families use as well
    "use_qk_norm": ("true", PLAIN),
    "partial_rotary_factor": ("0.5", PLAIN),
    "mlp_bias": ("true", PLAIN),
}

EXEMPT = {
    "attention": "test_a_back_end_that_cannot_run_is_refused, below: on a CPU there is but one",
    "log_period": "read by the console and TensorBoard: tests/diagnostics",
    "eval_interval": "read by the loop: test_evaluate.py",
    "eval_steps": "read by the loop: test_evaluate.py",
    "target_eval_loss": "read by the loop: test_evaluate.py",
    "abort_on_nan_loss": "each alone is read by the loop, both together change the step: test_guard.py",
    "abort_on_inf_loss": "as abort_on_nan_loss: test_guard.py",
    "enable_data_shuffling": "the order of the data: tests/input_pipeline/test_grain_coverage.py",
    "data_shuffle_seed": "the order of the data: tests/input_pipeline, tests/e2e/test_train.py",
}


class Program:
    """The train step and the start of training, as StableHLO, each lowered when asked for."""

    def __init__(self, config):
        self.config, self.setup = config, Setup.of(config)

    def step(self):
        with pytest.MonkeyPatch.context() as patch:  # stop where compiling begins
            patch.setattr(jax.stages.Lowered, "compile", lambda self, *arguments, **options: self)
            return self.setup.compile_train_step(self.config.global_batch_size_to_train_on).as_text()

    def start(self):
        return jax.jit(self.setup.fresh).lower().as_text()


@pytest.fixture(scope="module")
def programs(configure):
    """The program of some words, each lowered once."""
    made: dict[tuple, dict[str, str]] = {}

    def text(part, *words):
        known = made.setdefault(words, {})
        if part not in known:
            known[part] = getattr(Program(configure(*words)), part)()
        return known[part]

    return text


def acting():
    return {key for group in GROUPS for key in group.model_fields if ledger.status(key).kind == "acts"}


def test_every_acting_key_is_shown_to_act():
    """A key that begins to act needs a case here, or a reason why its effect is shown elsewhere."""
    assert not CASES.keys() & EXEMPT.keys()
    assert acting() == CASES.keys() | EXEMPT.keys()


def test_the_same_configuration_is_the_same_program(configure, programs):
    """Without this, a difference between two texts would show nothing."""
    for words in (PLAIN, PRODUCTS, YARN):
        assert Program(configure(*words)).step() == programs("step", *words)
    assert Program(configure(*PRODUCTS)).start() == programs("start", *PRODUCTS)


@pytest.mark.slow
@pytest.mark.parametrize("key", CASES)
def test_the_key_acts(programs, key):
    value, words = CASES[key]
    without = tuple(word for word in words if word.partition("=")[0] != key)
    base, changed = words, (*without, f"{key}={value}")
    same = programs("step", *base) == programs("step", *changed)
    if same:  # then it may change what training starts from
        assert programs("start", *base) != programs("start", *changed), f"{key}={value} changes nothing"


def test_a_back_end_that_cannot_run_is_refused(configure):
    for name in ("flash", "cudnn_flash_jax"):
        with pytest.raises(ConfigError, match=f"{name} cannot do this: it needs a .PU.*; use dot_product"):
            Program(configure(*PLAIN, f"attention={name}")).step()


UNREAD = [
    ("rope_factor=8", ()),
    ("original_max_position_embeddings=64", ()),
    ("beta_fast=8", ()),
    ("rope_interleave=false", ("rope_type=llama3.1",)),
    ("rope_attention_scaling=true", ("rope_type=llama3.1",)),
    ("rope_use_scale=false", ()),
    ("rope_linear_scaling_factor=2", ("rope_type=yarn",)),
    ("rope_max_timescale=500", ("trainable_position_size=16",)),
    ("partial_rotary_factor=0.5", ("use_untrainable_positional_embedding=true",)),
    ("sliding_window_size=4", ()),
    ("chunk_attn_window_size=4", ()),
    ("normalize_embedding_logits=false", ()),
    ("qk_norm_with_scale=false", ()),
    ("target_eval_loss=1", ()),
    ("attention_sink=true", ("decoder_block=simple",)),
    ("out_proj=device", ()),
]


@pytest.mark.parametrize(("word", "words"), UNREAD, ids=[word for word, _ in UNREAD])
def test_a_key_that_would_do_nothing_is_refused(configure, word, words):
    """As the optimizers refuse theirs (muon_beta under adamw): a key acts, or setting it is an error."""
    with pytest.raises(ConfigError, match=word.partition("=")[0]):
        Setup.of(configure(*words, word))


def test_learned_positions_reach_to_the_end_of_a_row(configure):
    with pytest.raises(ConfigError, match="trainable_position_size"):
        Setup.of(configure("trainable_position_size=8", "max_target_length=16"))


@pytest.mark.parametrize(
    "key",
    ["moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo", "query_wa_proj", "kv_wa_proj", "mla_q", "mla_kv", "engram"],
)
def test_remat_of_tensors_that_do_not_exist_is_not_said_to_act(key):
    """With remat_policy=custom, moe_mlpwo=device and the like change no program, while the ledger lists them."""
    assert ledger.status(key).kind != "acts"
