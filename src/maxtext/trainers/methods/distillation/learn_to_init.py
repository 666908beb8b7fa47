"""Learn-to-init: attention weights of a student as learned maps of the weights of its teacher.

Student and teacher have the same embedding size b and other numbers of heads x, u and head sizes
y, v. With C the teacher's weight, the student's weight K is

    query, key, value   K[b, u, v] = Σ C[b, x, y] A[x, u] B[y, v]
    out                 K[u, v, b] = Σ C[x, y, b] A[x, u] B[y, v]

or, with lti_use_general_linear_map, W[x, y, u, v] in place of the product of A and B. A, B and W
are trained in place of K, as `lti_a`, `lti_b` and `lti_w`. They are truncated normal with variance
1 / (number of summed terms). After training K is an ordinary weight.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.checkpoint.open import model_param_infos
from maxtext.checkpoint.weights import ParamInfo, ParamPath
from maxtext.common import hash_rng
from maxtext.common.errors import ConfigError
from maxtext.common.trees import flatten_dict, unflatten_dict
from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.layers.parameters import Initializer, Template
from maxtext.sharding.explicit import auto_sharded
from maxtext.trainers.methods.distillation.weight_maps import COPY_MAP, ParamInfos, match_names

PROJECTIONS = ("query", "key", "value", "out")
PROJECTION_WEIGHT = re.compile(
    rf"(?P<attention>layers/\d+/attention)/({'|'.join(PROJECTIONS)})/weight"
)
A, B, W = "lti_a", "lti_b", "lti_w"
INPUT = "embed"  # the logical axis of inputs: FSDP splits weights over it
SEED_NAME = "learn_to_init"


@dataclass(frozen=True)
class LearnedWeight:
    """A leaf of the student's weights, of one layer or of a stack of layers."""

    path: ParamPath
    names: tuple[str, ...]  # of its parameters, one for each layer
    sources: tuple[ParamInfo, ...]  # the teacher's parameter for each
    info: ParamInfo  # of the first layer
    axes: tuple[str | None, ...]  # logical axes of the leaf

    @property
    def is_stacked(self) -> bool:
        return self.info.stack_index is not None

    @property
    def is_out(self) -> bool:
        return self.path[-2] == "out"

    @property
    def sizes(self) -> tuple[int, ...]:
        """x, y of the teacher and u, v of the student."""
        heads = slice(0, 2) if self.is_out else slice(1, 3)
        return *self.sources[0].shape[heads], *self.info.shape[heads]

    @property
    def source_paths(self) -> tuple[ParamPath, ...]:
        """The leaves of the teacher's weights that it is made from."""
        return tuple(dict.fromkeys(source.path for source in self.sources))

    def factor_path(self, name: str) -> ParamPath:
        return (*self.path[:-1], name)

    def init_factors(self, initializer: Initializer, general: bool) -> dict[str, nnx.Param]:
        """The factors of one layer."""
        x, y, u, v = self.sizes
        axes = [axis for axis in self.axes if axis != "layers"]
        heads, head_dim = axes[:2] if self.is_out else axes[1:]
        if general:
            return {W: initializer.weight(W, (x, y), (u, v), (INPUT, None, heads, head_dim))}
        return {
            A: initializer.weight(A, (x,), (u,), (INPUT, heads)),
            B: initializer.weight(B, (y,), (v,), (INPUT, head_dim)),
        }

    def random_factors(self, initializer: Initializer, general: bool) -> dict[str, jax.Array]:
        """The factors of all layers of the leaf; each layer has its own key."""

        def of_layer(key: jax.Array) -> dict[str, jax.Array]:
            params = self.init_factors(replace(initializer, key=key), general)
            return {name: param.get_value() for name, param in params.items()}

        keys = jnp.array([initializer.fold(name) for name in self.names])
        return jax.vmap(of_layer)(keys) if self.is_stacked else of_layer(keys[0])

    def compute(self, factors: Mapping[str, jax.Array], *teacher_leaves: jax.Array) -> jax.Array:
        """K, from the factors and the teacher's leaves at `source_paths`."""
        leaves = dict(zip(self.source_paths, teacher_leaves, strict=True))
        teacher = jnp.stack([teacher_layer(source, leaves) for source in self.sources])
        teacher = teacher if self.is_stacked else teacher[0]
        c, k = ("xyz", "uvz") if self.is_out else ("zxy", "zuv")
        if W in factors:
            weight = jnp.einsum(f"...{c},...xyuv->...{k}", teacher, factors[W])
        else:
            weight = jnp.einsum(f"...{c},...xu,...yv->...{k}", teacher, factors[A], factors[B])
        weight = weight.astype(self.info.dtype)
        return jnp.moveaxis(weight, 0, self.info.stack_axis) if self.is_stacked else weight


@dataclass(frozen=True)
class LearnToInit:
    """`student`: the model as it runs; `template` has the factors in place of its weights."""

    config: MaxTextConfig
    student: Template
    weights: tuple[LearnedWeight, ...]

    @classmethod
    def from_config(
        cls,
        config: MaxTextConfig,
        student: Template,
        teacher_config: MaxTextConfig,
        teacher_template: Template,
    ) -> "LearnToInit":
        """A weight is made from the teacher's of the same name, or from that of
        distill_weights_copy_map. Raises ConfigError if the teacher has none, or other sizes."""
        infos = model_param_infos(student, config)
        teacher = model_param_infos(teacher_template, teacher_config)
        learned = learned_parameters(infos)
        if not learned:
            raise ConfigError(
                "learn_to_init_mode=true makes the weights query, key, value and out of attention, "
                "and no layer of the student has all of them (MLA has others, and fused_qkv=true "
                "merges them): leave it out"
            )
        copies = match_names(
            COPY_MAP, config.distill_weights_copy_map, teacher, infos, computed=learned
        )
        names_of_leaf: dict[ParamPath, list[str]] = {}
        for name in learned:
            names_of_leaf.setdefault(infos[name].path, []).append(name)
        axes = flatten_dict(student.axes)
        weights = tuple(
            LearnedWeight(
                path,
                tuple(names),
                sources=tuple(find_source(name, copies, infos, teacher) for name in names),
                info=infos[names[0]],
                axes=axes[path],
            )
            for path, names in names_of_leaf.items()
        )
        for weight in weights:
            check_equal_sources(weight)
        return cls(config, student, weights)

    @property
    def general(self) -> bool:
        return self.config.lti_use_general_linear_map

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters of the student that are computed."""
        return tuple(name for weight in self.weights for name in weight.names)

    @cached_property
    def template(self) -> Template:
        """The parameters that are trained. It cannot be bound: `model_weights` comes first."""
        state = dict(nnx.to_flat_state(self.student.state))
        for weight in self.weights:
            del state[weight.path]
            initializer = Initializer(None, weight.info.dtype)
            for name, param in weight.init_factors(initializer, self.general).items():
                shape, axes = param.get_value().shape, param.get_metadata()["axes"]
                if weight.is_stacked:
                    shape, axes = (len(weight.names), *shape), ("layers", *axes)
                abstract: Tree = jax.ShapeDtypeStruct(shape, weight.info.dtype)
                state[weight.factor_path(name)] = nnx.Param(abstract, axes=axes)
        return Template(self.student.graph, nnx.from_flat_state(state))

    def initial_weights(self, weights: Tree) -> Tree:
        """The trained parameters before the first step, from weights of the student, whose
        attention is left out; under jit."""
        leaves = flatten_dict(weights)
        key = hash_rng.key_from_seed(self.config.init_weights_seed)
        for weight in self.weights:
            initializer = Initializer(key, leaves.pop(weight.path).dtype)
            factors = weight.random_factors(initializer.child(SEED_NAME), self.general)
            leaves |= {weight.factor_path(name): value for name, value in factors.items()}
        return unflatten_dict(leaves)

    def model_weights(self, weights: Tree, teacher_weights: Tree) -> Tree:
        """The weights of the student, from the trained parameters; under jit."""
        leaves, teacher_leaves = flatten_dict(weights), flatten_dict(teacher_weights)
        names = (W,) if self.general else (A, B)
        for weight in self.weights:
            factors = {name: leaves.pop(weight.factor_path(name)) for name in names}
            sources = [teacher_leaves[path] for path in weight.source_paths]
            leaves[weight.path] = auto_sharded(
                weight.compute, factors, *sources, out_axes=weight.axes
            )
        return unflatten_dict(leaves)


def learned_parameters(infos: ParamInfos) -> tuple[str, ...]:
    """The names of the weights that are made from the teacher's: the PROJECTIONS of each layer
    that has all of them."""
    matches = [match for name in infos if (match := PROJECTION_WEIGHT.fullmatch(name))]
    projections = Counter(match["attention"] for match in matches)
    return tuple(
        match[0] for match in matches if projections[match["attention"]] == len(PROJECTIONS)
    )


def find_source(
    name: str, copies: Mapping[str, str], infos: ParamInfos, teacher: ParamInfos
) -> ParamInfo:
    """The teacher's parameter that a weight of the student is made from."""
    source = copies.get(name, name)
    if source not in teacher:
        raise ConfigError(
            f"learn_to_init_mode: the teacher has no {source!r}: map another of its weights to "
            f"{name!r} in {COPY_MAP}"
        )
    axis = -1 if name.endswith("/out/weight") else 0
    shapes = teacher[source].shape, infos[name].shape
    if len(shapes[0]) != 3 or shapes[0][axis] != shapes[1][axis]:
        raise ConfigError(
            f"learn_to_init_mode: {source!r} of the teacher has the shape {shapes[0]} and {name!r} "
            f"of the student {shapes[1]}: both models need the same emb_dim"
        )
    return teacher[source]


def check_equal_sources(weight: LearnedWeight) -> None:
    """Raise ConfigError if the layers of a stack have sources of different shapes."""
    shapes = {source.shape for source in weight.sources}
    if len(shapes) > 1:
        raise ConfigError(
            f"learn_to_init_mode: {weight.names[0]!r} and the other layers of its stack are made "
            f"from weights of different shapes ({', '.join(map(str, sorted(shapes)))}): set "
            "scan_layers=false"
        )


def teacher_layer(source: ParamInfo, leaves: Mapping[ParamPath, jax.Array]) -> jax.Array:
    leaf = leaves[source.path]
    if source.stack_index is None:
        return leaf
    return jax.lax.index_in_dim(leaf, source.stack_index, source.stack_axis, keepdims=False)
