"""Weights of a student that are shared with each other, or copied from its teacher before step 0.

A map has a pattern as key and a path as value: each parameter whose whole name matches the pattern
is a source, and the path, with the groups of the match (`\\1`) filled in, is its destination. Names
are those of checkpoints: `layers/0/attention/query/weight`, also if layers are scanned.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import jax

from maxtext.checkpoint.open import model_param_infos
from maxtext.checkpoint.weights import ModelWeights, ParamInfo, ParamPath
from maxtext.common.errors import ConfigError
from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.layers.parameters import Template

ParamInfos = Mapping[str, ParamInfo]
COPY_MAP = "distill_weights_copy_map"
SHARE_MAP = "distill_student_weights_share_map"


@dataclass(frozen=True)
class WeightMaps:
    """`shared` and `copied`: the name of the source of each destination. Shared parameters are one
    variable, under the name of the source."""

    student: ParamInfos
    teacher: ParamInfos
    shared: Mapping[str, str]
    copied: Mapping[str, str]

    @classmethod
    def from_config(
        cls,
        config: MaxTextConfig,
        template: Template,
        teacher_config: MaxTextConfig,
        teacher_template: Template,
        computed: Collection[str] = (),
    ) -> "WeightMaps":
        """`computed`: weights that the student computes from those of the teacher, which are
        destinations of the copy map as well, and not copied. Raises ConfigError if a pattern or a
        destination has no parameter, or shapes differ."""
        student = model_param_infos(template, config)
        teacher = model_param_infos(teacher_template, teacher_config)
        shared = match_names(SHARE_MAP, config.distill_student_weights_share_map, student, student)
        copied = match_names(
            COPY_MAP, config.distill_weights_copy_map, teacher, student, computed=computed
        )
        copied = {
            shared.get(name, name): source
            for name, source in copied.items()
            if name not in computed
        }
        return cls(student, teacher, shared=shared, copied=copied)

    @property
    def has_entries(self) -> bool:
        return bool(self.shared or self.copied)

    def share(self, weights: Tree) -> Tree:
        """The weights of the student, in which destinations are equal to their sources. The
        gradient of a source is the sum over its uses, that of a destination 0."""
        return self.replace(weights, self.shared, ModelWeights(weights, self.student))

    def copy(self, weights: Tree, teacher_weights: Tree) -> Tree:
        """The weights of the student at step 0."""
        source = ModelWeights(teacher_weights, self.teacher)
        return self.share(self.replace(weights, self.copied, source))

    def replace(self, weights: Tree, names: Mapping[str, str], source: ModelWeights) -> Tree:
        for name, source_name in names.items():
            info, value = self.student[name], source.get(source_name)
            weights = replace_parameter(weights, info.path, info, value)
        return weights


def replace_parameter(tree: Tree, path: ParamPath, info: ParamInfo, value: Tree) -> Tree:
    """The tree with another value of the parameter at `path`, cast to its dtype."""
    if path:
        branch = replace_parameter(tree[path[0]], path[1:], info, value)
        return {**tree, path[0]: branch}
    value = value.astype(tree.dtype)
    if info.stack_index is None:
        return value
    return jax.lax.dynamic_update_index_in_dim(tree, value, info.stack_index, info.stack_axis)


def match_names(
    key: str,
    patterns: Mapping[str, str],
    sources: ParamInfos,
    destinations: ParamInfos,
    computed: Collection[str] = (),
) -> dict[str, str]:
    """The source of each destination. Those in `computed` may have another shape."""
    names: dict[str, str] = {}
    for pattern, path in patterns.items():
        matches = [match for name in sources if (match := re.fullmatch(pattern, name))]
        if not matches:
            raise ConfigError(
                f"{key}: {pattern!r} matches no parameter; they have names such as "
                f"{next(reversed(list(sources)))!r}"
            )
        for match in matches:
            name, source = match.expand(path), match[0]
            if name in computed:
                names[name] = source
                continue
            if name not in destinations:
                raise ConfigError(
                    f"{key}: {source!r} has the destination {name!r}, and the student has no such "
                    "parameter"
                )
            shapes = sources[source].shape, destinations[name].shape
            if shapes[0] != shapes[1]:
                raise ConfigError(
                    f"{key}: {source!r} has the shape {shapes[0]} and its destination {name!r} "
                    f"{shapes[1]}"
                )
            names[name] = source
    chained = next((source for source in names.values() if source in names), None)
    if sources is destinations and chained is not None:
        raise ConfigError(f"{key}: {chained!r} is both a source and a destination: name one source")
    return names
