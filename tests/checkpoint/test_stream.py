"""Whole conversions: bits survive the way there and back, transformers computes the same, all
problems come at once.
"""

import re
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest

from maxtext.checkpoint.convert import (
    NATIVE_STEM,
    RenamedTensors,
    SafetensorsFolder,
    TensorInfo,
    from_hf,
    to_hf,
    write_hf_folder,
    write_native_folder,
)
from maxtext.checkpoint.weights import ModelWeights, ParamInfo, load_weights
from maxtext.common.errors import UserError
from maxtext.hf.rules import TensorRule


class Values:
    """Arrays as a source that notes what is read."""

    title = "values"

    def __init__(self, **arrays):
        self.arrays, self.order = arrays, []
        self.tensors = {
            name: TensorInfo(array.dtype, array.shape) for name, array in arrays.items()
        }

    def read(self, name):
        self.order.append(name)
        return self.arrays[name]


def make_param_infos(**shapes):
    return {
        name: ParamInfo((name,), None, 0, shape, np.dtype(np.float32))
        for name, shape in shapes.items()
    }


def numbers(*shape, dtype=np.float32, start=0):
    return (start + np.arange(np.prod(shape))).reshape(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_there_and_back(llama, dtype, tmp_path):
    """Folder to folder to folder, in several shards: the same bits in the same dtype."""
    _, _, param_infos = llama.model()
    tensors = llama.their_tensors(param_infos, dtype)
    write_hf_folder(tmp_path / "hf", llama.Random(tensors), {}, [], 40_000)
    there = from_hf(SafetensorsFolder.open(tmp_path / "hf"), llama.RULES, param_infos)
    write_native_folder(tmp_path / "native", there, {}, [], 30_000)
    native = SafetensorsFolder.open(tmp_path / "native", NATIVE_STEM)
    assert native.tensors == {
        name: TensorInfo(np.dtype(dtype), info.shape) for name, info in param_infos.items()
    }
    write_hf_folder(tmp_path / "back", to_hf(native, llama.RULES, param_infos), {}, [])
    back = SafetensorsFolder.open(tmp_path / "back")
    assert back.tensors == tensors
    for name, array in llama.Random(tensors):
        assert back.read(name).tobytes() == array.tobytes()
    # By hand, one of each kind.
    first = SafetensorsFolder.open(tmp_path / "hf")
    query = first.read("model.layers.2.self_attn.q_proj.weight")
    assert (
        native.read("layers/2/attention/query/weight").tobytes()
        == query.T.reshape(32, 4, 8).tobytes()
    )
    down = first.read("model.layers.3.mlp.down_proj.weight")
    assert native.read("layers/3/mlp/wo/weight").tobytes() == down.T.tobytes()


def test_transformers_computes_the_same(llama, tmp_path):
    """Their folder to our logits, and our folder to theirs."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    hf_model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).float().eval()
    hf_model.save_pretrained(tmp_path / "hf", max_shard_size="60KB")
    ids = np.random.default_rng(0).integers(0, 64, (2, 16))
    expected = hf_model(input_ids=torch.tensor(ids)).logits.detach().numpy()

    _, template, param_infos = llama.model(
        "normalization_layer_epsilon=1e-5", "matmul_precision=highest"
    )
    source = from_hf(SafetensorsFolder.open(tmp_path / "hf"), llama.RULES, param_infos)
    weights = load_weights(source, param_infos, template)  # straight from their folder
    positions = np.broadcast_to(np.arange(16), ids.shape)
    native = np.asarray(jax.jit(lambda weights: template.bind(weights)(ids, positions))(weights))
    np.testing.assert_allclose(native, expected, atol=3e-5 * expected.std(), rtol=3e-5)

    config = [tmp_path / "hf" / "config.json"]
    write_hf_folder(
        tmp_path / "back",
        to_hf(ModelWeights(weights, param_infos), llama.RULES, param_infos),
        {},
        config,
        50_000,
    )
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "back").float().eval()
    np.testing.assert_array_equal(
        again(input_ids=torch.tensor(ids)).logits.detach().numpy(), expected
    )


def test_one_error_for_all_problems(llama, hf_folder, tmp_path):
    folder = SafetensorsFolder.open(hf_folder[0])
    _, _, param_infos = llama.model("base_num_kv_heads=4", "base_num_decoder_layers=5")
    rules = [rule for rule in llama.RULES if rule.hf != "model.norm.weight"]
    with pytest.raises(UserError) as caught:
        write_native_folder(tmp_path / "out", from_hf(folder, rules, param_infos), {}, [])
    message = str(caught.value)
    # Our final norm has no rule; the fifth layer is missing (9 tensors); the keys and values of
    # four have another shape (8); their norm is unexpected.
    assert message.startswith(f"{hf_folder[0]} does not fit the model (19 problems): ")
    assert message.count(";") == 5
    assert message.endswith("; and 14 more")
    assert "no rule is known for the weight final_norm/scale [32]" in message
    assert "\n" not in message
    assert not any(tmp_path.iterdir())


def test_each_problem(llama, hf_folder):
    _, _, param_infos = llama.model()
    rest = {name: array for name, array in hf_folder[1].items() if name != "lm_head.weight"}
    for changes, message in [
        ({}, "(1 problem): lm_head.weight is missing"),
        (
            {"lm_head.weight": numbers(32, 64, dtype=ml_dtypes.bfloat16)},
            "(1 problem): lm_head.weight has shape [32, 64], the model needs [64, 32]",
        ),
        (
            {"lm_head.weight": hf_folder[1]["lm_head.weight"], "lm_tail.weight": numbers(3)},
            "(1 problem): lm_tail.weight is not a tensor of this model",
        ),
    ]:
        source = Values(**rest, **changes)
        with pytest.raises(
            UserError, match=re.escape(f"values does not fit the model {message}") + "$"
        ):
            from_hf(source, llama.RULES, param_infos)
        assert not source.order  # no data was read
    source = Values(**hf_folder[1], **{"model.layers.0.rotary_emb.inv_freq": numbers(3)})
    from_hf(source, llama.RULES, param_infos, ignored=[r".*rotary_emb\.inv_freq"])
    with pytest.raises(UserError, match="rotary_emb"):
        from_hf(
            source, llama.RULES, param_infos, ignored=[r"rotary_emb\.inv_freq"]
        )  # not the whole name


def test_tensors_of_one_rule_have_one_dtype():
    rule = TensorRule(("a", "b"), "o", "w -> w", join="w")
    source = Values(a=numbers(2), b=numbers(2, dtype=np.float16))
    with pytest.raises(UserError, match="a and b are one weight and have dtypes F16 and F32"):
        from_hf(source, [rule], make_param_infos(o=(4,)))
    made = from_hf(source, [rule], make_param_infos(o=(4,)), dtype=np.dtype(np.float32))
    np.testing.assert_array_equal(made.read("o"), [0, 1, 0, 1])
    assert made.tensors == {"o": TensorInfo(np.dtype(np.float32), (4,))}


EACH = TensorRule("experts.{x}", "w", "x m e -> x e m")
PACKED = TensorRule("packed", "w", "x e m -> x e m")
TURNED = TensorRule("packed", "w", "x m e -> x e m")


def test_the_first_rule_that_finds_its_tensors():
    native = numbers(2, 3, 4)
    param_infos = make_param_infos(w=(2, 3, 4))
    each = {"experts.0": native[0].T, "experts.1": native[1].T}
    for arrays, expected in [
        (each, EACH),
        ({"packed": native}, PACKED),
        ({"packed": native.swapaxes(1, 2)}, TURNED),  # by its shape
    ]:
        made = from_hf(Values(**arrays), [EACH, PACKED, TURNED], param_infos)
        assert made.steps[0] == expected.bind({"w": (2, 3, 4)})
        np.testing.assert_array_equal(made.read("w"), native)
    with pytest.raises(
        UserError, match=r"\(1 problem\): packed is not a tensor"
    ):  # the same weights twice
        from_hf(Values(**each, packed=native), [EACH, PACKED], param_infos)
    with pytest.raises(UserError, match=r"\(1 problem\): experts.1 is missing"):
        from_hf(Values(**{"experts.0": native[0].T}), [EACH, PACKED], param_infos)
    with pytest.raises(
        UserError, match=r"packed has shape \[2, 3, 5\], the model needs \[2, 3, 4\]"
    ):
        from_hf(Values(packed=numbers(2, 3, 5)), [EACH, PACKED, TURNED], param_infos)


def test_which_form_is_written():
    source = Values(w=numbers(2, 3, 4))
    param_infos = make_param_infos(w=(2, 3, 4))
    for names, expected in [
        (None, ["experts.0", "experts.1"]),
        ({"packed", "other"}, ["packed"]),
        ({"experts.0", "experts.1"}, ["experts.0", "experts.1"]),
        ({"experts.0", "packed"}, ["packed"]),  # all of its tensors must be among the names
        ({"experts.0"}, ["experts.0", "experts.1"]),  # none fits: the first
    ]:
        made = to_hf(source, [EACH, PACKED], param_infos, names)
        assert list(made.tensors) == [name for name, _ in made] == expected


def test_two_weights_in_one_tensor():
    """A head may be read from the embedding that it is tied to, but not both be written there."""
    rules = [
        TensorRule("e", "embedding", "v e -> v e"),
        TensorRule("h", "head", "v e -> e v"),
        TensorRule("e", "head", "v e -> e v"),
    ]
    param_infos = make_param_infos(embedding=(3, 2), head=(2, 3))
    made = dict(from_hf(Values(e=numbers(3, 2)), rules, param_infos))
    np.testing.assert_array_equal(made["head"], numbers(3, 2).T)
    np.testing.assert_array_equal(made["embedding"], numbers(3, 2))
    native = Values(embedding=numbers(3, 2), head=numbers(2, 3))
    assert list(to_hf(native, rules, param_infos).tensors) == ["e", "h"]
    with pytest.raises(UserError, match="e would have to hold both embedding and head"):
        to_hf(native, rules, param_infos, names={"e"})


def test_our_side_is_checked_as_well():
    rule = TensorRule("t", "a", "x -> x")
    with pytest.raises(
        UserError, match=r"\(2 problems\): a is missing; b is not a weight of this model"
    ):
        to_hf(Values(b=numbers(2)), [rule], make_param_infos(a=(2,)))
    with pytest.raises(UserError, match=r"no rule is known for the weight b \[2\]"):
        to_hf(Values(a=numbers(2), b=numbers(2)), [rule], make_param_infos(a=(2,), b=(2,)))


def test_weights_are_cast():
    made = to_hf(
        Values(a=np.array([1 / 3, 2])),
        [TensorRule("t", "a", "x -> x")],
        make_param_infos(a=(2,)),
        dtype=np.dtype(ml_dtypes.bfloat16),
    )
    arrays = dict(made)
    assert arrays["t"].dtype == made.tensors["t"].dtype == ml_dtypes.bfloat16
    assert float(arrays["t"][0]) == 0.333984375  # the nearest bfloat16 to a third


@pytest.mark.parametrize("dtype", [np.int32, ml_dtypes.float8_e4m3fn])
def test_only_floats_are_weights(dtype):
    rules, param_infos, array = (
        [TensorRule("t", "a", "x -> x")],
        make_param_infos(a=(2,)),
        np.array([1, 2], dtype),
    )
    with pytest.raises(UserError, match="t is .*, and a weight is F32"):
        from_hf(Values(t=array), rules, param_infos)
    with pytest.raises(UserError, match="a is .*, and a weight is F32"):
        to_hf(Values(a=array), rules, param_infos)


def test_layer_by_layer(llama, hf_folder):
    """Whatever the order of the rules, a layer is done before the next one begins."""
    source = Values(**hf_folder[1])
    _, _, param_infos = llama.model()
    made = from_hf(source, llama.RULES[::-1], param_infos)
    assert [name for name, _ in made] == list(made.tensors) == list(param_infos)
    layers = [int(name.split(".")[2]) for name in source.order if name.startswith("model.layers.")]
    assert layers == sorted(layers)
    assert len(source.order) == len(hf_folder[1])  # each read once


class Fresh:
    """Arrays that exist only while somebody holds them."""

    title = "fresh"

    def __init__(self, tensors):
        self.tensors = tensors

    def read(self, name):
        return np.ones(self.tensors[name].shape, self.tensors[name].dtype)


def peak(action):
    tracemalloc.start()
    action()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


def test_memory_holds_one_rule(tmp_path):
    """Three layers of 8 experts: a layer's weight is 4 MiB, a tensor of theirs 512 KiB. What was
    handed over goes.
    """
    rule = TensorRule("l.{i}.experts.{x}", "layers/{i}/w", "x m e -> x e m")
    param_infos = {
        f"layers/{i}/w": ParamInfo(("w",), i, 0, (8, 256, 512), np.dtype(np.float32))
        for i in range(3)
    }
    kind = np.dtype(np.float32)
    hf_tensors = Fresh(
        {f"l.{i}.experts.{x}": TensorInfo(kind, (512, 256)) for i in range(3) for x in range(8)}
    )
    native = Fresh({name: TensorInfo(kind, info.shape) for name, info in param_infos.items()})
    layer, tensor = 2**22, 2**19
    there, back = from_hf(hf_tensors, [rule], param_infos), to_hf(native, [rule], param_infos)
    assert (
        layer
        < peak(lambda: write_native_folder(tmp_path / "native", there, {}, []))
        < layer + 1.5 * tensor
    )
    assert (
        layer < peak(lambda: write_hf_folder(tmp_path / "hf", back, {}, [])) < layer + 1.5 * tensor
    )


def test_other_names_for_a_source(llama, hf_folder):
    _, _, param_infos = llama.model()
    source = Values(
        **{f"language_model.{name}": array for name, array in hf_folder[1].items()},
        other=numbers(1),
    )
    renamed = RenamedTensors(source, {name: f"language_model.{name}" for name in hf_folder[1]})
    made = from_hf(renamed, llama.RULES, param_infos)
    assert made.title == "values"
    expected = from_hf(Values(**hf_folder[1]), llama.RULES, param_infos)
    for name in ("head/weight", "layers/1/attention/key/weight"):
        assert made.read(name).tobytes() == expected.read(name).tobytes()
