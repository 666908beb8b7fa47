"""An EAGLE-3 head drafts what the same layer of torch does over whole sequences.

transformers has no such head. The reference is transformers' Llama layer, of which attention reads
twice the width, around which a few lines of torch follow the paper and the published folders.
"""

import json

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from maxtext import LLM
from maxtext.common.errors import ConfigError
from tests.parity.zoo import SETTINGS, SIZES, VOCABULARY, hf_model, stir
from tests.support.drafts import recorded_drafts

SIZE, LAYERS, DRAFT_VOCABULARY, NUM_DRAFTS = SIZES["hidden_size"], 5, 60, 3
PROMPT, NEW_TOKENS = [5, 9, 17, 100, 42, 7], 16


class Eagle(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        config._attn_implementation = "eager"
        self.fc = torch.nn.Linear(3 * SIZE, SIZE, bias=False)
        self.midlayer = LlamaDecoderLayer(config, 0)
        attention = self.midlayer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(attention, name)
            setattr(attention, name, torch.nn.Linear(2 * SIZE, old.out_features, bias=False))
        self.midlayer.hidden_norm = LlamaRMSNorm(SIZE, config.rms_norm_eps)
        self.norm = LlamaRMSNorm(SIZE, config.rms_norm_eps)
        self.lm_head = torch.nn.Linear(SIZE, DRAFT_VOCABULARY, bias=False)
        self.rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)

    def forward(self, hidden, embedded):
        layer = self.midlayer
        x = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(hidden)], -1)
        count = x.shape[1]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        angles = self.rotary(hidden, torch.arange(count)[None])
        hidden = hidden + layer.self_attn(x, position_embeddings=angles, attention_mask=mask)[0]
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return hidden, self.lm_head(self.norm(hidden))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model and a head for it."""
    where = tmp_path_factory.mktemp("eagle")
    torch.manual_seed(6)
    config = transformers.LlamaConfig(**SIZES | dict(num_hidden_layers=LAYERS))
    model = transformers.LlamaForCausalLM(config)
    stir(model)
    model.float().save_pretrained(where / "model")
    eagle = Eagle(config).float().eval()
    stir(eagle)
    tokens = torch.sort(torch.randperm(VOCABULARY)[:DRAFT_VOCABULARY]).values
    state = {name: tensor for name, tensor in eagle.state_dict().items() if "rotary" not in name}
    (where / "head").mkdir()
    state |= {
        "d2t": tokens - torch.arange(DRAFT_VOCABULARY),
        "t2d": torch.isin(torch.arange(VOCABULARY), tokens),
    }
    save_file(state, where / "head/model.safetensors", {"format": "pt"})
    entries = json.loads((where / "model/config.json").read_text()) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCABULARY,
    }
    (where / "head/config.json").write_text(json.dumps(entries))
    return where, eagle, tokens


def load(where):
    keys = dict(speculative_method="eagle3", speculative_model_path=str(where / "head"))
    return LLM.load(where / "model", **SETTINGS, **keys, num_speculative_tokens=NUM_DRAFTS)


def torch_drafts(model, eagle, tokens, ids):
    """The drafts after `ids` from the residuals after 2, 2 and 2 of 5 layers."""
    with torch.no_grad():
        states = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        hidden = eagle.fc(torch.cat([states[2], states[LAYERS // 2], states[LAYERS - 3]], -1))
        following, drafts = list(ids[1:]), []
        for _ in range(NUM_DRAFTS):
            embedded = model.model.embed_tokens(torch.tensor([following]))
            outputs, logits = eagle(hidden, embedded)
            drafts.append(int(tokens[logits[0, -1].argmax()]))
            following.append(drafts[-1])
            hidden = torch.cat([hidden, outputs[:, -1:]], 1)
    return drafts


@pytest.mark.slow
def test_drafts_of_a_head(folders, monkeypatch):
    where, eagle, tokens = folders
    monkeypatch.setattr("maxtext.inference.engine.acceptance.PAUSE_PROGRAMS", 0)
    plain = LLM.load(where / "model", **SETTINGS)
    steps = recorded_drafts(monkeypatch)
    llm = load(where)
    [completion] = llm.generate([PROMPT], max_new_tokens=NEW_TOKENS, ignore_eos=True)
    assert [completion] == plain.generate([PROMPT], max_new_tokens=NEW_TOKENS, ignore_eos=True)
    jax.effects_barrier()
    ids, model = [*PROMPT, *completion], hf_model(where / "model")
    steps = [step for step in steps if step[0] >= 0]
    assert len(steps) >= (NEW_TOKENS - 1) / (NUM_DRAFTS + 1)
    for position, drafts in steps:
        count = min(NUM_DRAFTS, len(ids) - 2 - position)
        assert drafts[:count] == torch_drafts(model, eagle, tokens, ids[: position + 1])[:count]


@pytest.mark.slow
def test_sampled_tokens_are_those_without_a_head(folders):
    prompts = np.random.default_rng(3).integers(3, VOCABULARY, (3, 9)).tolist()
    options = dict(max_new_tokens=20, ignore_eos=True, temperature=1.0, seed=4, top_p=0.9)
    plain = LLM.load(folders[0] / "model", **SETTINGS)
    assert load(folders[0]).generate(prompts, **options) == plain.generate(prompts, **options)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (dict(architectures=["LlamaForCausalLM"]), "is no EAGLE-3 head"),
        (dict(vocab_size=99), "has vocab_size=99 and the model 131"),
        (dict(draft_vocab_size=61), "needs lm_head.weight of shape"),
        (dict(draft_vocab_size="many"), "draft_vocab_size='many' must be a whole number"),
        (dict(hidden_size=None), "hidden_size"),
        (dict(eagle_config=[1]), "needs fc.weight of shape"),
        (dict(eagle_config="many"), "a model of 5 layers"),
        (dict(num_hidden_layers=2), "an EAGLE-3 head has one layer"),
        (dict(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}), "a model of 5 layers"),
    ],
)
def test_a_head_that_does_not_fit_is_one_sentence(folders, tmp_path, entries, message):
    where = folders[0]
    for file in (where / "head").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | entries))
    with pytest.raises(ConfigError) as error:
        LLM.load(
            where / "model",
            **SETTINGS,
            speculative_method="eagle3",
            speculative_model_path=str(tmp_path),
        )
    assert message in str(error.value)
