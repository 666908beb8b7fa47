"""A small Llama for the tests of conversion: its rules, by transformers' names, and folders of
random weights.

Run as a script it does one job in a process of its own; the job is JSON on standard input.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

from maxtext.checkpoint.convert import (
    NATIVE_STEM,
    SafetensorsFolder,
    from_hf,
    to_hf,
    write_hf_folder,
    write_native_folder,
)
from maxtext.checkpoint.tensors import TensorInfo
from maxtext.checkpoint.weights import find_param_infos, load_weights
from maxtext.common.trees import flatten_dict
from maxtext.configs.derive import Devices
from maxtext.hf.rules import TensorRule
from maxtext.models.configuration import load
from maxtext.models.registry import segments
from maxtext.models.transformer import make_template

LAYER = "model.layers.{i}."
RULES = [
    TensorRule("model.embed_tokens.weight", "embedder/embedding", "v e -> v e"),
    TensorRule("model.norm.weight", "final_norm/scale", "e -> e"),
    TensorRule("lm_head.weight", "head/weight", "v e -> e v"),
    TensorRule(f"{LAYER}input_layernorm.weight", "layers/{i}/attention_norm/scale", "e -> e"),
    TensorRule(f"{LAYER}post_attention_layernorm.weight", "layers/{i}/mlp_norm/scale", "e -> e"),
    TensorRule(
        f"{LAYER}self_attn.o_proj.weight", "layers/{i}/attention/out/weight", "e (h d) -> h d e"
    ),
    *(
        TensorRule(
            f"{LAYER}self_attn.{hf_name}_proj.weight",
            f"layers/{{i}}/attention/{native_name}/weight",
            "(h d) e -> e h d",
        )
        for hf_name, native_name in (("q", "query"), ("k", "key"), ("v", "value"))
    ),
    *(
        TensorRule(
            f"{LAYER}mlp.{hf_name}_proj.weight",
            f"layers/{{i}}/mlp/{native_name}/weight",
            "o n -> n o",
        )
        for hf_name, native_name in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo"))
    ),
]
SIZES = [
    "decoder_block=llama2",
    "vocab_size=64",
    "base_emb_dim=32",
    "base_num_query_heads=4",
    "base_num_kv_heads=2",
    "head_dim=8",
    "base_mlp_dim=48",
    "base_num_decoder_layers=4",
    "max_target_length=16",
    "dtype=float32",
    "attention=dot_product",
]


def model(*words, devices=1):
    """(configuration, template, param_infos) of the small Llama, changed by overrides."""
    settings = dict(word.split("=") for word in (*SIZES, *words))
    config = load(
        None,
        [f"{key}={value}" for key, value in settings.items()],
        environ={},
        devices=Devices(devices),
    )
    template = make_template(config)
    return config, template, find_param_infos(template, segments(config))


class Random:
    """Random bytes as the tensors of a checkpoint: NaNs and all, to be compared bit by bit."""

    title = "random tensors"

    def __init__(self, tensors):
        self.tensors = tensors
        self.draw = np.random.default_rng(0)

    def __iter__(self):
        for name, tensor in self.tensors.items():
            yield (
                name,
                np.frombuffer(self.draw.bytes(tensor.nbytes), tensor.dtype).reshape(tensor.shape),
            )


class Counted:
    """A source that counts how often it is read."""

    title = "counted"

    def __init__(self, source):
        self.source, self.tensors, self.reads = source, source.tensors, 0

    def read(self, name):
        self.reads += 1
        return self.source.read(name)


def their_tensors(param_infos, dtype, rules=RULES):
    shapes = {name: info.shape for name, info in param_infos.items()}
    bounds = [rule.bind(shapes, layer) for rule in rules for layer in rule.layers(shapes)]
    return {
        name: TensorInfo(np.dtype(dtype), shape)
        for bound in bounds
        for name, shape in zip(bound.hf_names, bound.hf_shapes, strict=True)
    }


def memory(field):
    """A figure of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def convert(job):
    """From Hugging Face and back, with the memory that each took beyond what was in use before."""
    _, _, param_infos = model(*job["words"])
    found = {}
    start = memory("VmRSS")
    write_native_folder(
        job["native"], from_hf(SafetensorsFolder.open(job["hf"]), RULES, param_infos), {}, []
    )
    found["from_hf"] = memory("VmHWM") - start
    write_hf_folder(
        job["back"],
        to_hf(SafetensorsFolder.open(job["native"], NATIVE_STEM), RULES, param_infos),
        {},
        [],
    )
    found["to_hf"] = memory("VmHWM") - start
    return found


def hang(job):
    """Convert half of a model and then wait to be killed."""
    _, _, param_infos = model()

    def progress(done, total, name):
        if done > total / 2:
            print("half", flush=True)
            time.sleep(120)

    write_native_folder(
        job["native"],
        from_hf(SafetensorsFolder.open(job["hf"]), RULES, param_infos),
        {},
        [],
        10_000,
        progress,
    )


def shard(job):
    """Load a native folder on the devices of this process, sharded by a configuration."""
    import jax

    from maxtext.sharding import AxisRules, make_mesh

    config, template, param_infos = model(*job["words"], devices=len(jax.devices()))
    rules = AxisRules.from_config(config, make_mesh(config))
    shardings = jax.tree.map(
        lambda leaf, axes: rules.sharding(axes, leaf.shape), template.weights, template.axes
    )
    counted = Counted(SafetensorsFolder.open(job["native"], NATIVE_STEM))
    weights = flatten_dict(
        load_weights(counted, param_infos, template, shardings, host_bytes=job["host_bytes"])
    )
    np.savez(
        job["file"],
        **{"/".join(map(str, path)): np.asarray(leaf) for path, leaf in weights.items()},
    )
    return {
        "devices": len(jax.devices()),
        "reads": counted.reads,
        "split": {
            "/".join(map(str, path)): [
                leaf.addressable_shards[0].data.shape,
                leaf.shape,
                str(leaf.sharding == where),
            ]
            for (path, leaf), where in zip(
                weights.items(), flatten_dict(shardings).values(), strict=True
            )
        },
    }


if __name__ == "__main__":
    job = json.loads(sys.stdin.read())
    print(json.dumps({"convert": convert, "hang": hang, "shard": shard}[job["do"]](job)))
