"""Trains a model on one device and in each layout; run by matrix.py in a process with eight
devices.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 \\
        python -m tests.sharding.run_layouts MODEL [LAYOUT ...]

prints a line of JSON for each layout.
"""

import json
import re
import sys

import jax
import numpy as np
import optax

from maxtext.common.errors import ConfigError
from maxtext.configs.derive import Devices
from maxtext.models.configuration import load
from maxtext.trainers.build import build_run_context
from maxtext.trainers.checkpointing.init_state import initial_state
from maxtext.trainers.compilation.compile import compile_train_step
from maxtext.trainers.data_loader import to_devices
from tests.sharding.layouts import COMMON, LAYOUTS, LENGTH, MODELS, ROWS, VOCABULARY

STEPS = 2  # the gradients of the second depend on the update of the first
COLLECTIVE = re.compile(
    r" = \(?\w+\[([\d,]*)\].*? (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\("
)


def batch():
    """Rows of two documents and padding."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCABULARY, (ROWS, LENGTH + 1))
    segments, positions = np.zeros((ROWS, LENGTH), int), np.zeros((ROWS, LENGTH), int)
    for row in range(ROWS):
        end = int(rng.integers(LENGTH // 4, LENGTH // 2))
        last = int(rng.integers(LENGTH - 4, LENGTH + 1))
        segments[row, :end], positions[row, :end] = 1, np.arange(end)
        segments[row, end:last], positions[row, end:last] = 2, np.arange(last - end)
    fields = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
    for name in ("inputs", "targets"):
        fields |= {f"{name}_position": positions, f"{name}_segmentation": segments}
    return {name: field.astype(np.int32) for name, field in fields.items()}


def make_context(overrides, devices):
    config = load(
        None,
        [*overrides, f"per_device_batch_size={ROWS // devices}"],
        environ={},
        devices=Devices(devices),
    )
    return build_run_context(config, jax.devices()[:devices])


def train(context, state, step=None, rows=slice(None)):
    """Losses and gradients of STEPS steps, with the rows in the order `rows`; the compiled step."""
    step = step or compile_train_step(context, ROWS)
    losses, gradients = [], []
    for _ in range(STEPS):
        ordered = {name: field[rows] for name, field in batch().items()}
        state, metrics = step(state, to_devices(context, ordered), context.key)
        losses.append(float(metrics["loss"]))
        gradients.append(flat(optax.tree_utils.tree_get(state.opt_state, "mu")))
    return losses, gradients, step


def flat(tree):
    leaves = jax.tree.leaves_with_path(tree)
    return {"/".join(str(step.key) for step in path): np.asarray(leaf) for path, leaf in leaves}


def largest_error(gradients, expected_gradients):
    """(relative error, tensor, step) of the gradient with the largest error."""
    return max(
        (
            float(np.linalg.norm(got[name] - want[name]) / max(np.linalg.norm(want[name]), 1e-6)),
            name,
            step,
        )
        for step, (got, want) in enumerate(zip(gradients, expected_gradients, strict=True))
        for name in want
        if got[name].shape == want[name].shape  # else layers are stacked along another axis
    )


def gathered_weights(context, collectives):
    """Weights that are gathered to more than a device needs.

    They must be gathered over axes that shard tokens (fsdp), and must not be gathered over axes
    that shard the work (tensor, expert).
    """
    rules, template = context.rules, context.template
    token_axes = {
        axis
        for name in ("activation_batch", "activation_length")
        for axis in rules.axes_of((name,), (10**9 * rules.mesh.size,))[0]
    }
    expert_axes = set(rules.axes_of(("activation_exp",), (rules.mesh.size,))[0])
    results = {signature(shape) for kind, shape in collectives if kind == "all-gather"}
    needed_by_some, too_large = set(), []
    for (path, leaf), axes in zip(
        jax.tree.leaves_with_path(template.weights),
        jax.tree.leaves(template.axes, is_leaf=lambda leaf: isinstance(leaf, tuple)),
        strict=True,
    ):
        needed, full = [], []
        for name, size, split in zip(
            axes, leaf.shape, rules.axes_of(axes, leaf.shape), strict=True
        ):
            # Routers score all experts on each device.
            is_expert = name == "exp" and path[-3].key == "experts"
            work = [
                axis
                for axis in split
                if axis not in token_axes or (is_expert and axis in expert_axes)
            ]
            if name != "layers":  # a step of the scan has one layer
                full.append(size)
                num_shards = int(np.prod([rules.mesh.shape[axis] for axis in work], dtype=int))
                needed.append(size // num_shards)
        needed_by_some.add(signature(needed))
        if needed != full and len(full) > 1 and signature(full) in results:
            too_large.append((jax.tree_util.keystr(path), signature(full)))
    return [name for name, shape in too_large if shape not in needed_by_some]


def signature(shape):
    return tuple(sorted(size for size in shape if size > 1))


def collective_shapes(text):
    """(kind, shape) of each collective of a compiled program."""
    return [
        (kind, tuple(int(size) for size in shape.split(",") if size))
        for line in text.splitlines()
        if " all-" in line or " reduce-scatter" in line
        for shape, kind in COLLECTIVE.findall(line)
    ]


def main(model, names):
    overrides = [*COMMON, *MODELS[model]]
    single = make_context(overrides, 1)
    state = initial_state(single)
    start = jax.tree.map(np.asarray, state)
    losses, gradients, step = train(single, state)
    # The effect of rounding on one device: the same rows, summed in another order.
    _, reordered, _ = train(
        single, jax.device_put(start, single.shardings.state), step, slice(None, None, -1)
    )
    noise = largest_error(reordered, gradients)[0]
    for name in names:
        try:
            context = make_context([*overrides, *LAYOUTS[name]], 8)
        except ConfigError as error:
            print(json.dumps({"layout": name, "refused": str(error)}), flush=True)
            continue
        shapes = jax.tree.map(lambda leaf: leaf.shape, context.abstract_state)
        if jax.tree.map(np.shape, start) == shapes:
            state = jax.device_put(start, context.shardings.state)
        else:
            state = initial_state(context)
        layout_losses, layout_gradients, step = train(context, state)
        collectives = collective_shapes(step.as_text())
        report = {
            "layout": name,
            "loss": max(
                abs(got - want) / abs(want) for got, want in zip(layout_losses, losses, strict=True)
            ),
            "gradient": largest_error(layout_gradients, gradients),
            "noise": noise,
            "collectives": sorted({kind for kind, _ in collectives}),
            "gathered": gathered_weights(context, collectives),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or list(LAYOUTS))
