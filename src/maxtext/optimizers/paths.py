"""Paths of parameters, and the regular expressions that match them.

A path is the keys in the tree joined by "/": `layers/0/0/attention/query/weight`. Patterns are
searched in it (`re.search`): `norm` matches all parameters with norm anywhere in the path, and
`^head/` only those of the head.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER
from maxtext.common.types import Tree


def parameter_paths(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> Tree:
    """The tree with each leaf replaced by its path."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/"),
        tree,
        is_leaf=is_leaf,
    )


def match_patterns(
    key: str, patterns: Sequence[str], paths: Tree, warn: bool = True, required: bool = True
) -> Tree:
    """A tree of bools: whether any pattern of the configuration key `key` matches the path.

    Raises ConfigError if no pattern matches any path: a typo would freeze or decay the wrong
    weights. A single pattern without a match may come from a list for several families; it is only
    logged, with `warn`. Without `required`, nothing has to match.
    """
    all_paths = jax.tree.leaves(paths)
    unmatched = [
        pattern for pattern in patterns if not any(re.search(pattern, path) for path in all_paths)
    ]
    if required and patterns and len(unmatched) == len(patterns):
        raise ConfigError(
            f"{key}={list(patterns)} matches no parameter: "
            f"patterns are searched in paths such as {all_paths[0]!r}"
        )
    for pattern in unmatched if warn else ():
        LOGGER.warning("%s: the pattern %r matches no parameter", key, pattern)
    return jax.tree.map(lambda path: any(re.search(pattern, path) for pattern in patterns), paths)
