"""Names of parameters, and the regexes that select them.

A parameter's name is its path in the tree joined by "/": `layers/0/0/attention/query/weight`.
Patterns are searched in it (`re.search`), so `norm` selects every parameter with norm anywhere in
its path, and `^head/` only the head's.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER


def path_names(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """The same tree with each leaf replaced by its path."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/"),
        tree,
        is_leaf=is_leaf,
    )


def selected(key: str, patterns: Sequence[str], names: Any, warn: bool = True) -> Any:
    """The tree of names as booleans: whether any pattern of the config key `key` matches.

    Patterns of which none matches anything are a mistake (a typing error would freeze or decay the
    wrong weights); a single one without a match may come from a list that serves several families,
    and is only reported.
    """
    everything = jax.tree.leaves(names)
    idle = [
        pattern for pattern in patterns if not any(re.search(pattern, name) for name in everything)
    ]
    if patterns and len(idle) == len(patterns):
        raise ConfigError(
            f"{key}={list(patterns)} matches no parameter: patterns are searched in paths such as {everything[0]!r}"
        )
    for pattern in idle if warn else ():
        LOGGER.warning("%s: the pattern %r matches no parameter", key, pattern)
    return jax.tree.map(lambda name: any(re.search(pattern, name) for pattern in patterns), names)
