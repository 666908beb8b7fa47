"""Functions that every device runs on its own shards, where the compiler must not choose how
devices talk.

A `Split` says for each dimension of a tensor which mesh axes cut it, outermost first;
`AxisRules.axes_of` makes one from logical names. A tensor is the same on all devices of an axis
that its split does not name.

    rules = current()
    if rules is None: ...  # one device, or no mesh: call the function as it is
    split = rules.axes_of(("activation_batch", "activation_length"), x.shape)
    y = run_manual(rules, function, (x,), (split,), split)

Inside, a tensor is known to differ between the devices of the axes that cut it, and what it is
combined with differs, too; where JAX makes a copy "differ", the gradient is summed over these
devices. A result must differ only over the axes that its split names, which JAX checks.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.sharding.rules import AxisRules, active_rules, use_rules

Split = Sequence[tuple[str, ...]]


def current() -> AxisRules | None:
    """The rules that a step is traced under, if its mesh has more than one device."""
    rules = active_rules()
    return rules if rules is not None and rules.mesh.size > 1 else None


def run_manual(
    rules: AxisRules,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    splits: Sequence[Any],
    result: Split,
    check: bool = True,
) -> Any:
    """`function` of each device's shards. `result`: the split of the array that it returns. An
    argument that is a tree of its own kind has a tree of specs for a split. Without `check` JAX
    believes what `result` says."""

    def apart(*shards: jax.Array) -> Any:
        with use_rules(None):  # a shard is laid out already: nothing inside may be constrained
            return function(*shards)

    specs = tuple(spec(split) if isinstance(split, tuple | list) else split for split in splits)
    run = jax.shard_map(
        apart, mesh=rules.mesh, in_specs=specs, out_specs=spec(result), check_vma=check
    )
    return run(*arguments)


def sharding(rules: AxisRules, split: Split) -> NamedSharding:
    return NamedSharding(rules.mesh, spec(split))


def spec(split: Split) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in split))


def used(*splits: Split) -> tuple[str, ...]:
    """All mesh axes of some splits, each once, in order."""
    return tuple(dict.fromkeys(axis for split in splits for axes in split for axis in axes))


def differing(x: jax.Array, axes: Iterable[str], known: Iterable[str] = ()) -> jax.Array:
    """x, said to differ over `axes` beside the `known` ones, over which it does already; its
    gradient is summed there.

    Say so before a gather, and the gradient is summed after its scatter, when it is small.
    """
    known = set(known)
    further = tuple(axis for axis in axes if axis not in known)
    return jax.lax.pcast(x, further, to="varying") if further else x


def platform(rules: AxisRules) -> str:
    """Of the mesh's devices, which need not be this machine's: cpu, gpu or tpu."""
    return rules.mesh.devices.flat[0].platform
