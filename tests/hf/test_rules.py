"""Rules both ways: against numpy written out, against a loop over elements for random rules, and
bit by bit.
"""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest

from maxtext.hf.rules import TensorRule, copy_bits

E, H, K, G, D, M, X = 6, 4, 2, 2, 3, 5, 3


def numbers(*shape, start=0):
    return np.arange(start, start + math.prod(shape), dtype=np.int64).reshape(shape)


def check(rule, native, hf, layer=None):
    """The rule takes `native` (by name) to `hf` (by name, in this order) and back."""
    bound = rule.bind({name: array.shape for name, array in native.items()}, layer)
    assert bound.hf_names == tuple(hf)
    assert bound.native_names == tuple(native)
    assert bound.hf_shapes == tuple(array.shape for array in hf.values())
    assert bound.native_shapes == tuple(array.shape for array in native.values())
    for made, expected in zip(bound.to_hf(list(native.values())), hf.values(), strict=True):
        np.testing.assert_array_equal(made, expected)
        assert made.flags.c_contiguous
    for made, expected in zip(bound.to_native(hf.values()), native.values(), strict=True):
        np.testing.assert_array_equal(made, expected)
        assert made.flags.c_contiguous


def test_projection():
    native = numbers(E, H, D)
    rule = TensorRule(
        "model.layers.{i}.q_proj.weight", "layers/{i}/attention/query/weight", "(h d) e -> e h d"
    )
    hf = native.reshape(E, H * D).T
    check(
        rule,
        {"layers/7/attention/query/weight": native},
        {"model.layers.7.q_proj.weight": hf},
        layer=7,
    )


def test_same_layout_and_words_as_axes():
    native = numbers(E, M)
    check(
        TensorRule("wte", "embedder/embedding", "vocabulary embed -> vocabulary embed"),
        {"embedder/embedding": native},
        {"wte": native},
    )


def test_a_dimension_of_one():
    taps = numbers(4, K, G)  # native [t, k, w]; hf is a torch Conv1d [(k w), 1, t]
    check(
        TensorRule("conv", "c", "(k w) 1 t -> t k w"),
        {"c": taps},
        {"conv": taps.reshape(4, K * G).T[:, None, :]},
    )
    check(TensorRule("scale", "s", "1 -> "), {"s": np.array(3)}, {"scale": np.array([3])})


def test_one_tensor_an_expert():
    native = numbers(X, E, M)
    hf = {f"l.{i}.experts.{x}.w1": native[x].T for x in range(X) for i in [4]}
    check(
        TensorRule("l.{i}.experts.{x}.w1", "layers/{i}/wi", "x m e -> x e m"),
        {"layers/4/wi": native},
        hf,
        layer=4,
    )


def test_one_number_an_expert():
    check(TensorRule("experts.{x}.scale", "scale", "x -> x"), {"scale": numbers(X)}, {
        "experts.0.scale": np.array(0), "experts.1.scale": np.array(1),
        "experts.2.scale": np.array(2)
    })  # fmt: skip


def test_one_tensor_dealt_out():
    gate, up = numbers(X, E, M), numbers(X, E, M, start=1000)
    hf = np.stack([gate, up], axis=-1).reshape(X, E, 2 * M)  # gate and up alternate, as in gpt-oss
    check(
        TensorRule("gate_up", "l/wi_{b}/weight", "x e (m b) -> b x e m"),
        {"l/wi_0/weight": gate, "l/wi_1/weight": up},
        {"gate_up": hf},
    )
    hf = np.concatenate([gate, up], axis=-1)  # all of gate, then all of up
    check(
        TensorRule("gate_up", "l/wi_{b}/weight", "x e (b m) -> b x e m"),
        {"l/wi_0/weight": gate, "l/wi_1/weight": up},
        {"gate_up": hf},
    )


def test_both_sides_counted():
    gate, up = numbers(X, E, M), numbers(X, E, M, start=1000)
    hf = {f"e.{x}.gate_up": np.concatenate([gate[x], up[x]], axis=1).T for x in range(X)}
    check(
        TensorRule("e.{x}.gate_up", "wi_{b}", "x (b m) e -> b x e m"),
        {"wi_0": gate, "wi_1": up},
        hf,
    )
    native = {f"o/{x}": numbers(E, M, start=100 * x) for x in range(X)}
    hf = {f"t.{x}": native[f"o/{x}"].T for x in range(X)}
    check(TensorRule("t.{x}", "o/{x}", "x m e -> x e m"), native, hf)


def test_joined_within_each_head():
    """Qwen3-Next's in_proj_qkvz: for every key head its q, k, v and z, of different widths."""
    q, k, v = numbers(E, K, 3), numbers(E, K, 3, start=1000), numbers(E, K, 4, start=2000)
    hf = np.concatenate([q, k, v], axis=2).reshape(E, K * 10).T
    check(
        TensorRule("qkv", ("q", "k", "v"), "(k w) e -> e k w", join="w"),
        {"q": q, "k": k, "v": v},
        {"qkv": hf},
    )


def test_joined_flat():
    q, k, v = numbers(E, 4, D), numbers(E, 2, D, start=1000), numbers(E, 2, 2 * D, start=2000)
    hf = np.concatenate([one.reshape(E, -1).T for one in (q, k, v)], axis=0)
    check(
        TensorRule("qkv", ("q", "k", "v"), "(k w) e -> e k w", join=0),
        {"q": q, "k": k, "v": v},
        {"qkv": hf},
    )
    check(
        TensorRule("qkv", ("q", "k", "v"), "e (k w) -> e k w", join=1),
        {"q": q, "k": k, "v": v},
        {"qkv": hf.T},
    )


def test_joined_flat_one_tensor_an_expert():
    gate, up = numbers(X, E, M), numbers(X, E, 2 * M, start=1000)
    hf = {f"e.{x}": np.concatenate([gate[x].T, up[x].T], axis=0) for x in range(X)}
    check(
        TensorRule("e.{x}", ("gate", "up"), "x m e -> x e m", join=0), {"gate": gate, "up": up}, hf
    )


def test_joined_on_the_native_side():
    """Separate q, k, v to one weight [E, K, G + 2, D]: a key head's queries, its key, its value."""
    q, k, v = numbers(K * G * D, E), numbers(K * D, E, start=1000), numbers(K * D, E, start=2000)
    native = np.concatenate(
        [q.T.reshape(E, K, G, D), k.T.reshape(E, K, 1, D), v.T.reshape(E, K, 1, D)], axis=2
    )  # fmt: skip
    for sizes in ((G, 1, 1), (None, 1, 1)):
        rule = TensorRule(("q", "k", "v"), "qkv", "(k w d) e -> e k w d", join="w", sizes=sizes)
        check(rule, {"qkv": native}, {"q": q, "k": k, "v": v})
    each = ("(k w d) e -> e k w d", "(k w d) e -> e k w d", "e (k w d) -> e k w d")
    rule = TensorRule(("q", "k", "v"), "qkv", each, join="w", sizes=(G, 1, 1))
    check(rule, {"qkv": native}, {"q": q, "k": k, "v": v.T})


def test_joined_on_the_native_side_in_equal_parts():
    gate, up = numbers(M, E), numbers(M, E, start=1000)
    rule = TensorRule(("gate", "up"), "wi", "(b m) e -> e b m", join="b")
    check(rule, {"wi": np.stack([gate.T, up.T], axis=1)}, {"gate": gate, "up": up})


def test_a_rule_passes_over_what_a_model_lacks():
    rule = TensorRule("l.{i}.w", "layers/{i}/w", "a b -> b a")
    shapes = {
        "layers/0/w": (2, 3),
        "layers/2/w": (2, 3),
        "layers/3/w": (2, 3, 4),
        "layers/10/w": (2, 3),
        "x": (1,),
    }
    assert rule.layers(shapes) == [0, 2, 3, 10]
    assert rule.bind(shapes, 1) is None
    assert rule.bind(shapes, 3) is None  # as many axes as the pattern's are needed
    assert rule.bind(shapes, 10).hf_names == ("l.10.w",)
    assert TensorRule("w", ("x", "y"), "a -> a", join=0).bind(shapes) is None
    assert TensorRule("w", "y", "a -> a").layers(shapes) == [None]
    assert TensorRule("w", "wi_{b}", "b a -> b a").bind(shapes) is None


BAD = {
    "no arrow": dict(hf="a", native="b", pattern="x y"),
    "two arrows": dict(hf="a", native="b", pattern="x -> x -> x"),
    "different axes": dict(hf="a", native="b", pattern="x y -> x z"),
    "an axis twice": dict(hf="a", native="b", pattern="x x -> x x"),
    "flattened on the native side": dict(hf="a", native="b", pattern="x y -> (x y)"),
    "nested": dict(hf="a", native="b", pattern="(x (y z)) -> x y z"),
    "punctuation": dict(hf="a", native="b", pattern="x, y -> x y"),
    "unknown placeholder": dict(hf="a.{z}", native="b", pattern="x -> x"),
    "counted inside parentheses": dict(hf="a.{x}", native="b", pattern="(x y) -> x y"),
    "layer on one side": dict(hf="a.{i}", native="b", pattern="x -> x"),
    "join without several": dict(hf="a", native="b", pattern="x -> x", join="x"),
    "several without join": dict(hf="a", native=("b", "c"), pattern="x -> x"),
    "several on both sides": dict(hf=("a", "d"), native=("b", "c"), pattern="x -> x", join="x"),
    "join is no axis": dict(hf="a", native=("b", "c"), pattern="x -> x", join="y"),
    "join is counted": dict(hf="a.{x}", native=("b", "c"), pattern="x y -> x y", join="x"),
    "join is no dimension": dict(hf="a", native=("b", "c"), pattern="(x y) -> x y", join=1),
    "number joins native": dict(hf=("a", "c"), native="b", pattern="x y -> x y", join=0),
    "sizes for native": dict(hf="a", native=("b", "c"), pattern="x -> x", join="x", sizes=(1, 1)),
    "too few sizes": dict(hf=("a", "c"), native="b", pattern="x -> x", join="x", sizes=(1,)),
    "two unknown sizes": dict(
        hf=("a", "c"), native="b", pattern="x -> x", join="x", sizes=(None, None)
    ),
    "too few patterns": dict(
        hf=("a", "c", "d"), native="b", pattern=("x -> x", "x -> x"), join="x"
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rules(name):
    with pytest.raises(ValueError, match=".{20}"):
        TensorRule(**BAD[name])


def test_weights_that_do_not_join():
    with pytest.raises(ValueError, match="cannot be concatenated"):
        TensorRule("t", ("a", "b"), "(k w) e -> e k w", join="w").bind(
            {"a": (2, 3, 4), "b": (2, 2, 4)}
        )
    with pytest.raises(ValueError, match="cannot be concatenated"):
        TensorRule("t", ("a", "b"), "w e -> e w", join=0).bind({"a": (2, 3), "b": (4, 3)})
    with pytest.raises(ValueError, match="do not add up to 4"):
        TensorRule(("t", "u"), "a", "w -> w", join="w", sizes=(3, 2)).bind({"a": (4,)})
    with pytest.raises(ValueError, match="do not add up to 5"):
        TensorRule(("t", "u"), "a", "w -> w", join="w").bind({"a": (5,)})


def test_arrays_that_do_not_belong():
    bound = TensorRule(("t", "u"), "a", "w -> w", join="w").bind({"a": (4,)})
    with pytest.raises(ValueError, match="u is"):
        bound.to_native([np.zeros(2), np.zeros(3)])
    with pytest.raises(ValueError, match="u is"):
        bound.to_native([np.zeros(2), np.zeros(2, np.float32)])
    with pytest.raises(ValueError, match="a is"):
        list(bound.to_hf([np.zeros(3)]))


DTYPES = [
    np.float64,
    np.float32,
    np.float16,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    np.int8,
    np.int64,
    np.bool_,
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_any_dtype(dtype):
    """Every pattern of bits, NaNs with payloads among them, moves unchanged."""
    size = np.dtype(dtype).itemsize
    data = np.random.default_rng(0).integers(
        0, 2 if dtype is np.bool_ else 256, 8 * 6 * size, np.uint8
    )
    native = data.view(dtype).reshape(8, 2, 3)
    bound = TensorRule("t", "o", "(b c) a -> a b c").bind({"o": native.shape})
    (hf,) = bound.to_hf([native])
    assert hf.dtype == native.dtype
    bits = data.reshape(8, 6, size)
    np.testing.assert_array_equal(hf.view(np.uint8).reshape(6, 8, size), bits.swapaxes(0, 1))
    (back,) = bound.to_native([hf])
    assert back.dtype == native.dtype
    assert back.tobytes() == native.tobytes()


@pytest.mark.parametrize(
    "shape", [(130, 200), (64, 64), (1, 300), (300, 1), (65, 3, 70), (0, 5), ()]
)
def test_copy_in_strips(shape):
    """Longer than a strip, not a multiple of it, and thin ones."""
    source = numbers(*shape)
    target = np.full(shape[::-1], -1, np.int64)
    copy_bits(target.T, source)
    np.testing.assert_array_equal(target, source.T)


# Random rules against a loop over elements.


def random_case(draw):
    """A rule and the sizes of each part's axes, with their counted axes and native."""
    axes = list("abcde"[: draw.integers(1, 6)])
    kind = draw.choice(["plain", "axis", "number", "hf"])
    order = list(draw.permutation(axes))
    counted = [axis for axis in axes if draw.random() < 0.2]
    our_counted = [axis for axis in axes if draw.random() < 0.2 and axis not in counted]
    lone = [axis for axis in axes if axis not in counted and axis not in our_counted]
    if kind in ("axis", "hf") and not lone:
        kind = "plain"
    if kind == "number" and set(order) == set(counted):
        kind = "plain"
    groups, group = [], []
    for axis in order:
        if axis in counted:
            groups += [[axis]] if not group else [group, [axis]]
            group = []
        else:
            group.append(axis)
            if draw.random() < 0.5:
                groups.append(group)
                group = []
    groups += [group] if group else []
    if draw.random() < 0.3:
        groups.insert(draw.integers(0, len(groups) + 1), [])
    sides = (
        " ".join(
            "1" if not one else one[0] if len(one) == 1 else f"({' '.join(one)})" for one in groups
        ),
        " ".join(draw.permutation(axes)),
    )
    count = 1 if kind == "plain" else int(draw.integers(2, 4))
    sizes = [{axis: int(draw.integers(1, 4)) for axis in axes}] * count
    join = None
    if kind in ("axis", "hf"):
        join = str(draw.choice(lone))
        sizes = [one | {join: int(draw.integers(1, 4))} for one in sizes]
    if kind == "number":
        dimensions = [one for one in groups if not set(one) & set(counted)]
        wide = [place for place, one in enumerate(dimensions) if set(one) - set(our_counted)]
        if not wide:
            kind, count, sizes = "plain", 1, sizes[:1]
        else:
            join = int(draw.choice(wide))
            axis = next(axis for axis in dimensions[join] if axis not in our_counted)
            sizes = [one | {axis: int(draw.integers(1, 4))} for one in sizes]
    hf = [f"t{part}" if kind == "hf" else "t" for part in range(count)]
    native = [f"o{part}" if kind != "hf" else "o" for part in range(count)]
    hf = [".".join([name, *(f"{{{axis}}}" for axis in counted)]) for name in hf]
    native = ["/".join([name, *(f"{{{axis}}}" for axis in our_counted)]) for name in native]
    rule = TensorRule(
        tuple(hf) if kind == "hf" else hf[0],
        tuple(native) if kind in ("axis", "number") else native[0],
        " -> ".join(sides),
        join,
        tuple(one[join] for one in sizes) if kind == "hf" else None,
    )
    return rule, kind, sizes, groups, sides[1].split(), hf, native


def loop(rule, kind, sizes, groups, our_axes, hf, native):
    """[(their name, index, our name, index)] of every element, by counting."""
    pairs = []
    for part, own in enumerate(sizes):
        shift = sum(
            one[rule.join] if isinstance(rule.join, str) else width(groups, hf[part], one,
                rule.join)
            for one in sizes[:part]
        ) if rule.join is not None else 0  # fmt: skip
        whole = dict(own)
        if kind == "axis":
            whole[rule.join] = sum(one[rule.join] for one in sizes)
        for at in itertools.product(*(range(own[axis]) for axis in our_axes)):
            number = dict(zip(our_axes, at, strict=True))
            there = number | ({rule.join: number[rule.join] + shift} if kind == "axis" else {})
            here = number | ({rule.join: number[rule.join] + shift} if kind == "hf" else {})
            index = []
            for group in groups:
                if group and f"{{{group[0]}}}" in hf[part]:
                    continue
                flat = 0
                for axis in group:
                    flat = flat * whole[axis] + there[axis]
                index.append(flat)
            if kind == "number":
                index[rule.join] += shift
            our_index = tuple(here[axis] for axis in our_axes if f"{{{axis}}}" not in native[part])
            pairs.append(
                (
                    hf[part].format(**number),
                    tuple(index),
                    native[part].format(**number),
                    our_index,
                )
            )
    return pairs


def width(groups, name, sizes, dimension):
    kept = [group for group in groups if not (group and f"{{{group[0]}}}" in name)]
    return math.prod(sizes[axis] for axis in kept[dimension])


@pytest.mark.parametrize("seed", range(400))
def test_random_rules(seed):
    rule, kind, *rest = random_case(np.random.default_rng(seed))
    pairs = loop(rule, kind, *rest)
    shapes = {}
    for _, _, name, index in pairs:
        shapes[name] = tuple(
            max(a, b + 1) for a, b in zip(shapes.get(name, (0,) * len(index)), index, strict=True)
        )
    assert sum(math.prod(shape) for shape in shapes.values()) == len(pairs)
    draw = np.random.default_rng(seed)
    bound = rule.bind(shapes)
    assert set(bound.native_names) == set(shapes)
    native = {name: draw.integers(0, 2**31, shapes[name]) for name in bound.native_names}
    hf = dict(zip(bound.hf_names, bound.to_hf(list(native.values())), strict=True))
    assert sum(array.size for array in hf.values()) == len(pairs)
    for name, index, our_name, our_index in pairs:
        assert hf[name][index] == native[our_name][our_index]
    for name, array in zip(bound.native_names, bound.to_native(hf.values()), strict=True):
        np.testing.assert_array_equal(array, native[name])


def test_random_rules_are_of_every_kind():
    cases = [random_case(np.random.default_rng(seed)) for seed in range(400)]
    kinds = [kind for _, kind, *_ in cases]
    assert min(kinds.count(kind) for kind in ("plain", "axis", "number", "hf")) > 40
    assert sum("{" in rule.hf_names[0] and "{" in rule.native_names[0] for rule, *_ in cases) > 20
