"""run by matrix.py in a process with eight CPU devices: trains one model on one device and in every
layout.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.sharding.run_layouts MODEL [LAYOUT ...]

prints a line of JSON for each layout.
"""

import json
import re
import sys

import jax
import numpy as np
import optax

from maxtext.common.errors import ConfigError
from maxtext.configs import load
from maxtext.configs.derive import Devices
from maxtext.trainers.compile import COMPILER_OPTIONS, compile_train_step
from maxtext.trainers.data_loader import to_devices
from maxtext.trainers.init_state import initial_state
from maxtext.trainers.run_context import RunContext
from tests.compiling import FAST_COMPILE
from tests.sharding.layouts import COMMON, LAYOUTS, LENGTH, MODELS, ROWS, VOCABULARY

# Programs that run three times need not be fast.
COMPILER_OPTIONS["cpu"] = FAST_COMPILE
COLLECTIVE = re.compile(
    r" = \(?\w+\[([\d,]*)\].*? (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\("
)


def batch():
    """Rows of two documents and padding."""
    draw = np.random.default_rng(0)
    ids = draw.integers(0, VOCABULARY, (ROWS, LENGTH + 1))
    segments, positions = np.zeros((ROWS, LENGTH), int), np.zeros((ROWS, LENGTH), int)
    for row in range(ROWS):
        end = int(draw.integers(LENGTH // 4, LENGTH // 2))
        last = int(draw.integers(LENGTH - 4, LENGTH + 1))
        segments[row, :end], positions[row, :end] = 1, np.arange(end)
        segments[row, end:last], positions[row, end:last] = 2, np.arange(last - end)
    fields = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
    for name in ("inputs", "targets"):
        fields |= {f"{name}_position": positions, f"{name}_segmentation": segments}
    return {name: field.astype(np.int32) for name, field in fields.items()}


def set_up(words, devices):
    config = load(
        None,
        [*words, f"per_device_batch_size={ROWS // devices}"],
        environ={},
        devices=Devices(devices),
    )
    return RunContext.from_config(config, jax.devices()[:devices])


def train(context, state, step=None, rows=slice(None)):
    """The loss and the gradients of three steps on the rows in this order, and the compiled
    step.
    """
    step = step or compile_train_step(context, ROWS)
    losses, gradients = [], []
    for _ in range(3):
        ordered = {name: field[rows] for name, field in batch().items()}
        state, metrics = step(state, to_devices(context, ordered), context.key)
        losses.append(float(metrics["loss"]))
        gradients.append(flat(optax.tree_utils.tree_get(state.optimizer, "mu")))
    return losses, gradients, step


def flat(tree):
    leaves = jax.tree.leaves_with_path(tree)
    return {"/".join(str(step.key) for step in path): np.asarray(leaf) for path, leaf in leaves}


def largest_error(found, expected):
    """(error over norm, tensor, step) of the gradient that is furthest off."""
    return max(
        (
            float(
                np.linalg.norm(ours[name] - theirs[name]) / max(np.linalg.norm(theirs[name]), 1e-6)
            ),
            name,
            step,
        )
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True))
        for name in theirs
        if ours[name].shape == theirs[name].shape  # else the layers lie along another axis
    )


def gathered_weights(context, collectives):
    """Weights that an all-gather makes larger than a device needs: axes that split tokens (fsdp)
    have to be gathered, those that split the work (tensor, the owners of experts) must not be."""
    rules, template = context.rules, context.template
    tokens = {axis for names in (("activation_batch",), ("activation_length",))
              for axis in rules.axes_of(names, (10**9 * rules.mesh.size,))[0]}  # fmt: skip
    owners = set(rules.axes_of(("activation_exp",), (rules.mesh.size,))[0])
    results = {signature(shape) for kind, shape in collectives if kind == "all-gather"}
    needed_by_some, too_large = set(), []
    for (path, leaf), axes in zip(
        jax.tree.leaves_with_path(template.weights),
        jax.tree.leaves(template.axes, is_leaf=lambda leaf: isinstance(leaf, tuple)),
        strict=True,
    ):
        needed, whole = [], []
        for name, size, split in zip(
            axes, leaf.shape, rules.axes_of(axes, leaf.shape), strict=True
        ):
            owned = (
                name == "exp" and path[-3].key == "experts"
            )  # a router scores all experts wherever its tokens are
            work = [axis for axis in split if axis not in tokens or (owned and axis in owners)]
            if name != "layers":  # a step of the scan has one
                whole.append(size)
                needed.append(
                    size // int(np.prod([rules.mesh.shape[axis] for axis in work], dtype=int))
                )
        needed_by_some.add(signature(needed))
        if needed != whole and len(whole) > 1 and signature(whole) in results:
            too_large.append((jax.tree_util.keystr(path), signature(whole)))
    return [name for name, shape in too_large if shape not in needed_by_some]


def signature(shape):
    return tuple(sorted(size for size in shape if size > 1))


def sent(text):
    """(kind, shape) of each collective of a compiled program."""
    return [
        (kind, tuple(int(size) for size in shape.split(",") if size))
        for line in text.splitlines()
        if " all-" in line or " reduce-scatter" in line
        for shape, kind in COLLECTIVE.findall(line)
    ]


def main(model, names):
    words = [*COMMON, *MODELS[model]]
    alone = set_up(words, 1)
    state = alone.initial_state()
    start = jax.tree.map(np.asarray, state)
    losses, gradients, step = train(alone, state)
    # What rounding costs one device itself: the same rows, summed in another order.
    _, reordered, _ = train(
        alone, jax.device_put(start, alone.state_shardings), step, slice(None, None, -1)
    )
    noise = largest_error(reordered, gradients)[0]
    for name in names:
        try:
            context = set_up([*words, *LAYOUTS[name]], 8)
        except ConfigError as error:
            print(json.dumps({"layout": name, "refused": str(error)}), flush=True)
            continue
        same = jax.tree.map(np.shape, start) == jax.tree.map(
            lambda leaf: leaf.shape, context.abstract_state
        )
        placed = jax.device_put(start, context.shardings.state) if same else initial_state(context)
        found, after, step = train(context, placed)
        collectives = sent(step.as_text())
        report = {
            "layout": name,
            "loss": max(
                abs(ours - theirs) / abs(theirs) for ours, theirs in zip(found, losses, strict=True)
            ),
            "gradient": largest_error(after, gradients),
            "noise": noise,
            "collectives": sorted({kind for kind, _ in collectives}),
            "gathered": gathered_weights(context, collectives),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or list(LAYOUTS))
