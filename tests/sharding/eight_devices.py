"""Run by test_devices.py in a separate process with eight CPU devices; prints its results as
JSON.
"""

import json
import sys

import jax
import numpy as np

from maxtext.models.configuration import load
from maxtext.sharding import make_mesh
from maxtext.trainers.build import build_run_context
from maxtext.trainers.checkpointing.init_state import initial_state
from maxtext.trainers.compilation.compile import compile_eval_step, compile_train_step
from maxtext.trainers.data_loader import to_devices


def describe_mesh(overrides):
    mesh = make_mesh(load(None, overrides, environ={}))
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    return {
        "shape": {axis: size for axis, size in mesh.shape.items() if size > 1},
        "ids": ids.squeeze().tolist(),
    }


def train(overrides, batch, path):
    """Train two steps: losses, and the shard and global shapes of weights. Weights go to a file."""
    context = build_run_context(load(None, overrides, environ={}))
    rows = len(next(iter(batch.values())))
    state, step = initial_state(context), compile_train_step(context, rows)
    losses = []
    for _ in range(2):
        state, metrics = step(state, to_devices(context, batch), context.key)
        losses.append(float(metrics["loss"]))
    leaves = {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(state.weights)
    }
    np.savez(path, **{name: np.asarray(leaf) for name, leaf in leaves.items()})
    moments = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree.leaves_with_path(state.opt_state)
    }
    return {
        "losses": losses,
        "weights": {
            name: [leaf.addressable_shards[0].data.shape, leaf.shape]
            for name, leaf in leaves.items()
        },
        "moments": {
            name: [leaf.addressable_shards[0].data.shape, leaf.shape]
            for name, leaf in moments.items()
        },
    }


def evaluate(overrides, batch):
    """The mean loss of the initial weights, and the shape of a device's part of the batch."""
    keys = ["eval_interval=1", "eval_steps=1", "eval_per_device_batch_size=1", *overrides]
    context = build_run_context(load(None, keys, environ={}))
    context.shardings.check()
    evaluation, state = context.for_evaluation(), initial_state(context)
    fields = to_devices(evaluation, batch)
    step = compile_eval_step(evaluation, len(batch["inputs"]))
    sums = step(state.weights, state.reference, fields)
    return {
        "loss": float(sums["loss"]) / float(sums["count"]),
        "part": fields["inputs"].addressable_shards[0].data.shape,
    }


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    batch = {name: np.asarray(field, np.int32) for name, field in job["batch"].items()}
    results = {
        "devices": len(jax.devices()),
        "meshes": [describe_mesh(mesh) for mesh in job["meshes"]],
    }
    results["evaluate"] = [
        evaluate([*job["train"], *rules], batch) for rules in ([], job["eval_rules"])
    ]
    results["train"] = train(job["train"], batch, job["path"])
    print(json.dumps(results))
