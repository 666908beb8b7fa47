"""Sizes of the mesh axes, from the ici_*_parallelism and dcn_*_parallelism keys."""

import math

from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig, Settings

MESH_KEYS = {"stage": "pipeline"}  # the only mesh axis whose keys have another name


def size_key(axis: str, network: str) -> str:
    return f"{network}_{MESH_KEYS.get(axis, axis)}_parallelism"


def axis_sizes(config: MaxTextConfig, network: str) -> list[int]:
    return [getattr(config, size_key(axis, network)) for axis in config.mesh_axes]


def check_unused_axes(config: MaxTextConfig, network: str) -> None:
    """Raise ConfigError for the size of an axis that is not in mesh_axes."""
    prefix, suffix = f"{network}_", "_parallelism"
    used = {size_key(axis, network) for axis in config.mesh_axes}
    for key in Settings.model_fields:
        sized = key.startswith(prefix) and key.endswith(suffix) and key != f"{network}_parallelism"
        if sized and key not in used and getattr(config, key) not in (1, -1):
            axis = key.removeprefix(prefix).removesuffix(suffix)
            raise ConfigError(
                f"{key}={getattr(config, key)}, but mesh_axes has no axis {axis!r}: add it or "
                "leave the key 1"
            )


def infer_axis_sizes(config: MaxTextConfig, network: str, total: int, unit: str) -> list[int]:
    """The axis sizes, with at most one -1 inferred so that they multiply to `total`."""
    check_unused_axes(config, network)
    sizes = axis_sizes(config, network)
    named = dict(zip(config.mesh_axes, sizes, strict=True))
    bad = [axis for axis, size in named.items() if size < 1 and size != -1]
    if bad:
        raise ConfigError(
            f"{size_key(bad[0], network)}={named[bad[0]]}: use a size of 1 or more, or -1"
        )
    free = [size_key(axis, network) for axis, size in named.items() if size == -1]
    if len(free) > 1:
        raise ConfigError(
            f"{' and '.join(free)} are both -1: only one size of a group can be inferred, set "
            "the others"
        )
    known = math.prod(size for size in sizes if size != -1)
    if free and total % known == 0:
        return [total // known if size == -1 else size for size in sizes]
    if not free and known == total:
        return sizes
    given = ", ".join(f"{axis}={size}" for axis, size in named.items() if size != 1) or "all 1"
    raise ConfigError(
        f"the {network}_*_parallelism sizes ({given}) multiply to {known}, which does not make "
        f"{total} {unit}: change them, or set one of them to -1 to have it inferred"
    )
