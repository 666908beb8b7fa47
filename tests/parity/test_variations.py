"""config.json is read as transformers reads it: for variations of its entries, the logits are equal
or the folder is refused.
"""

import itertools
import json

import numpy as np
import pytest
import torch
import transformers
import zoo
from variations import BASES, LINEAR_ROPE, OLD, THETA, YARN, Variation, rope, variations

from maxtext import LLM
from maxtext.common.errors import UserError
from maxtext.models.hf_registry import MAPPINGS, hf_config, model_layer, read_config

TOLERANCE = 5e-4  # of the standard deviation of the logits
LENGTH = 40
IDS = np.random.default_rng(0).integers(3, zoo.VOCABULARY, (1, LENGTH))


class Comparison:
    """Outcomes of variations, with one folder of weights for all variations of the same tensors."""

    def __init__(self, root):
        self.root = root
        self.bases = {}
        self.folders = {}
        self.states = {}
        self.logits = {}

    def base(self, model_type):
        if model_type not in self.bases:
            case = zoo.CASES[BASES[model_type]]
            config = getattr(transformers, f"{case.kind}Config")(**case.options)
            class_name = type(transformers.AutoModelForCausalLM.from_config(config)).__name__
            self.bases[model_type] = config.to_diff_dict() | {
                "architectures": [class_name],
                "dtype": "float32",
                "transformers_version": transformers.__version__,
            }
        return json.loads(json.dumps(self.bases[model_type]))

    def outcome(self, variation):
        """(what happened, detail): equal; refused; illegal, which transformers cannot load; wrong:
        other logits, or an error that is not of the user.
        """
        entries = self.base(variation.model_type) | variation.changes
        entries = {name: value for name, value in entries.items() if value is not zoo.ABSENT}
        text = json.dumps(entries)
        try:
            folder, expected = self.hf_logits(text)
        except Exception as error:
            expected = f"{type(error).__name__}: {error}"
            folder, _ = self.hf_logits(json.dumps(self.base(variation.model_type)))
            (folder / "config.json").write_text(text)
        try:
            logits = self.native_logits(folder)
        except UserError as error:
            legal = not isinstance(expected, str)
            return ("refused" if legal else "illegal"), str(error)
        except Exception as error:
            return "wrong", f"{type(error).__name__}: {error}"
        if isinstance(expected, str):
            return "illegal", f"read here; transformers: {expected}"
        error = zoo.distance(logits, expected)
        if not error < TOLERANCE:
            return "wrong", f"{error:.1e} of the logits' deviation"
        return self.written(folder, expected)

    def folder(self, key):
        if key not in self.folders:
            self.folders[key] = self.root / str(len(self.folders))
            self.folders[key].mkdir()
        return self.folders[key]

    def hf_logits(self, text):
        """A folder with this config.json and tensors that transformers saved, and its logits."""
        path = self.root / "config.json"
        path.write_text(text)
        config = transformers.AutoConfig.from_pretrained(path)
        assert config.hidden_size < 1000, "the sizes of the class, of a model beyond this memory"
        config._experts_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
        tied = bool(config.tie_word_embeddings)
        shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        key = json.dumps([type(model).__name__, tied, shapes])
        if key not in self.states:
            torch.manual_seed(0)
            zoo.stir(model)
            self.states[key] = model.state_dict()
            model.save_pretrained(self.folder(key))
        model.load_state_dict(self.states[key])
        logits = zoo.logits(model.eval(), IDS)
        assert np.isfinite(logits).all()
        (self.folder(key) / "config.json").write_text(text)
        return self.folder(key), logits

    def native_logits(self, folder):
        """Logits of the folder, which are computed once for folders that state the same."""
        layer = model_layer(read_config(folder), "config.json")
        key = str(folder) + json.dumps(
            {name: setting.value for name, setting in layer.items()}, sort_keys=True
        )
        if key not in self.logits:
            llm = LLM.load(folder, **zoo.SETTINGS)
            self.logits[key] = np.asarray(llm.logits(IDS)), llm.config
        logits, self.config = self.logits[key]
        return logits

    def written(self, folder, expected):
        """The config.json that is written means the same to transformers, or is refused."""
        try:
            entries = hf_config(self.config, "float32")
        except UserError as error:
            return "equal", f"not written: {error}"
        (folder / "config.json").write_text(json.dumps(entries))
        error = zoo.distance(zoo.hf_logits(folder, IDS), expected)
        return ("equal", "") if error < 1e-5 else ("wrong", f"written: {error:.1e}")


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return Comparison(tmp_path_factory.mktemp("variations"))


FULL, SLIDING = zoo.FULL, zoo.SLIDING
EQUAL = {
    "rope_scaling beside rope_parameters": ("qwen3", {"rope_scaling": YARN}),
    "type for rope_type": ("llama", rope(type="linear", factor=4.0, rope_theta=THETA)),
    "a fraction that heads do not have": ("mistral", {"partial_rotary_factor": 0.5}),
    "a length beside rope_parameters": (
        "llama",
        rope(**YARN) | {"original_max_position_embeddings": 64},
    ),
    "no temperature": ("deepseek_v3", rope(**YARN, mscale=1.0, mscale_all_dim=0.0)),
    "a base beside the default rotation": ("gpt_oss", OLD | {"rope_theta": THETA}),
    "bases of two kinds of layers": ("olmo3", OLD | {"rope_theta": THETA}),
    "truncate of two kinds of layers": (
        "olmo3",
        rope(**{FULL: YARN, SLIDING: {"rope_type": "default"}, "truncate": False}),
    ),
    "a scaling that replaces both kinds": (
        "gemma4_text",
        {"rope_scaling": {FULL: LINEAR_ROPE, SLIDING: YARN}},
    ),
    "a cap that the layers do not have": ("gemma3_text", {"attn_logit_softcapping": 1.5}),
    "the exact gelu": ("gemma4_text", {"hidden_activation": "gelu"}),
    "an activation by another name": ("gemma", {"hidden_activation": "relu"}),
    "biases that the layers do not have": ("phi3", {"attention_bias": True, "mlp_bias": True}),
    "a router without options": (
        "qwen3_5_moe_text",
        {"norm_topk_prob": False, "mlp_only_layers": [0]},
    ),
    "another name of a field": ("gpt2", {"n_embd": zoo.ABSENT, "hidden_size": 48}),
}
REFUSED = {
    "all tokens attend to all": ("cohere2", {"is_causal": False}, "is_causal=false"),
    "layers of other sizes": (
        "llama",
        {"per_layer_config": {"0": {"num_key_value_heads": 1}}},
        "per_layer_config=",
    ),
    "another family": ("llama", {"model_type": "mistral"}, "model_type is mistral"),
    "rotations by kind of layer": (
        "qwen2",
        rope(**{FULL: LINEAR_ROPE}),
        "rope_parameters has full_attention",
    ),
    "a rotated part": (
        "llama",
        rope(**LINEAR_ROPE, partial_rotary_factor=0.5),
        "heads of this family rotate as a whole",
    ),
    "an odd rotated part": (
        "phi3",
        rope(rope_theta=THETA, partial_rotary_factor=0.6),
        "an even number",
    ),
    "an activation of linear attention": ("qwen3_next", {"hidden_act": "relu"}, "hidden_act="),
    "no window": ("mistral", {"sliding_window": 0}, "sliding_window=0"),
}


def test_all_model_types_are_varied():
    assert BASES.keys() == {mapping.model_type for mapping in MAPPINGS}


@pytest.mark.parametrize("name", EQUAL)
def test_acts_as_in_transformers(name, comparison):
    model_type, changes = EQUAL[name]
    assert comparison.outcome(Variation(model_type, changes)) == ("equal", "")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_act_is_refused(name, comparison):
    model_type, changes, words = REFUSED[name]
    kind, detail = comparison.outcome(Variation(model_type, changes))
    assert kind in ("refused", "illegal")
    assert words in detail


# What transformers reads of a configuration and logits do not depend on.
TRAINING = {
    *("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "initializer_range"),
    "residual_dropout",
    *("gradient_checkpointing", "router_aux_loss_coef", "router_jitter_noise"),
}
OUTPUTS = {
    *("output_attentions", "output_cross_attentions", "output_hidden_states", "return_dict"),
    *("output_router_logits", "name_or_path", "dtype", "auto_map", "quantization_config"),
    *("pad_token_id", "reorder_and_upcast_attn"),
}
OTHER_MODELS = {
    *("decoder", "generator", "is_encoder_decoder", "text_config", "sub_configs"),
    *("vision_aspect_ratio", "vision_feature_layer", "vision_feature_select_strategy"),
}
DERIVED = {"is_heterogeneous", "serialize_explicit_per_layer_config", "kv_sharing_modes"}
# The class keeps it, and its layers do not use it.
KEPT = {("gemma3_text", "attn_logit_softcapping")}


@pytest.mark.parametrize("model_type", BASES)
def test_every_entry_that_transformers_reads_is_known(model_type, comparison, monkeypatch):
    """While a model is built and computes, the names of the configuration that it asks for."""
    config = transformers.AutoConfig.for_model(
        **comparison.base(model_type) | {"dtype": None, "transformers_version": None}
    )
    names, get = set(), transformers.PreTrainedConfig.__getattribute__

    def record(self, name):
        names.add(name)
        return get(self, name)

    monkeypatch.setattr(transformers.PreTrainedConfig, "__getattribute__", record)
    zoo.logits(transformers.AutoModelForCausalLM.from_config(config).eval(), IDS)
    monkeypatch.undo()
    mapping = next(mapping for mapping in MAPPINGS if mapping.model_type == config.model_type)
    aliases = (field.aliases for field in mapping.entries.values())
    known = {*mapping.entries, *itertools.chain(*aliases)}
    known |= TRAINING | OUTPUTS | OTHER_MODELS | DERIVED
    unknown = {
        name
        for name in names - known
        if not name.startswith(("_", "base_model_", "default_"))
        and not callable(getattr(type(config), name, None))
        and (model_type, name) not in KEPT
    }
    if not hasattr(config, "layer_types") or "layer_types" not in mapping.entries:
        unknown -= {"layer_types"}  # caches ask for it
    assert {"hidden_size", "num_hidden_layers"} & names
    assert not unknown


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", BASES)
def test_every_field_acts_as_in_transformers_or_is_refused(model_type, comparison):
    outcomes = {str(varied): comparison.outcome(varied) for varied in variations(model_type)}
    wrong = {name: detail for name, (kind, detail) in outcomes.items() if kind == "wrong"}
    assert not wrong
    assert sum(kind in ("equal", "refused") for kind, _ in outcomes.values()) > 150
