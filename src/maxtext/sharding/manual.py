"""Functions that every device runs on its own shards (shard_map), where the compiler must not
choose the communication.

A `Split` lists for each dimension of a tensor the mesh axes that shard it, outermost first;
`AxisRules.axes_of` makes one from logical names. A tensor is replicated over the axes that its
split does not name.

    rules = current()
    if rules is None: ...  # one device, or no mesh: call the function itself
    split = rules.axes_of(("activation_batch", "activation_length"), x.shape)
    y = run_manual(rules, function, (x,), (split,), split)

Inside, a tensor varies over the mesh axes that shard it, and so does everything computed from it;
where JAX casts a replicated value to a varying one, its gradient is summed over those devices. A
result may vary only over the axes that its split names, which JAX checks.
"""

from collections.abc import Callable, Iterable, Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.common.types import Tree
from maxtext.sharding.rules import AxisRules, active_rules, use_rules

Split = Sequence[tuple[str, ...]]


def current() -> AxisRules | None:
    """The rules that a step is traced under, if its mesh has more than one device."""
    rules = active_rules()
    return rules if rules is not None and rules.mesh.size > 1 else None


def run_manual(
    rules: AxisRules,
    function: Callable[..., Tree],
    args: Sequence[Tree],
    splits: Sequence[Tree],
    result: Split,
    check: bool = True,
) -> Tree:
    """`function` of each device's shards. `result`: the split of the array that it returns. The
    split of an argument that is a pytree is a tree of PartitionSpecs. Without `check`, JAX does not
    verify `result`."""

    def run_on_shards(*shards: jax.Array) -> Tree:
        with use_rules(None):  # shards are placed already: nothing inside may be constrained
            return function(*shards)

    specs = tuple(spec(split) if isinstance(split, tuple | list) else split for split in splits)
    run = jax.shard_map(
        run_on_shards, mesh=rules.mesh, in_specs=specs, out_specs=spec(result), check_vma=check
    )
    return run(*args)


def sharding(rules: AxisRules, split: Split) -> NamedSharding:
    return NamedSharding(rules.mesh, spec(split))


def spec(split: Split) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in split))


def used_axes(*splits: Split) -> tuple[str, ...]:
    """The mesh axes of some splits, each once, in order."""
    return tuple(dict.fromkeys(axis for split in splits for axes in split for axis in axes))


def cast_varying(x: jax.Array, axes: Iterable[str], varying: Iterable[str] = ()) -> jax.Array:
    """x cast to vary over `axes`, besides those over which it varies already; its gradient is
    summed over them.

    Cast before a gather, so that the gradient is summed after its scatter, when it is small.
    """
    varying = set(varying)
    new_axes = tuple(axis for axis in axes if axis not in varying)
    return jax.lax.pcast(x, new_axes, to="varying") if new_axes else x


def platform(rules: AxisRules) -> str:
    """The platform of the mesh's devices, which need not be this machine's: cpu, gpu or tpu."""
    return rules.mesh.devices.flat[0].platform
