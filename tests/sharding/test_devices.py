"""Meshes of eight devices, and training steps that equal those of a single device."""

import json

import jax
import numpy as np
import pytest

from maxtext.configs.derive import Devices
from maxtext.input_pipeline.row_formats import DOCUMENTS
from maxtext.models.configuration import load
from maxtext.models.transformer import make_template
from maxtext.optimizers import build_optimizer
from maxtext.sharding import AxisRules, make_mesh
from maxtext.trainers.batch_size import RowBatches
from maxtext.trainers.checkpointing.init_state import initial_state
from maxtext.trainers.compilation.compile import compile_train_step
from maxtext.trainers.data_loader import to_devices
from maxtext.trainers.objective import LanguageModelObjective
from maxtext.trainers.run_context import RunContext
from tests.compiling import cpu_devices
from tests.forked import run_python

ROWS, LENGTH = 8, 16
MODEL = [
    "vocab_size=64",
    f"max_target_length={LENGTH}",
    "base_emb_dim=32",
    "base_num_query_heads=4",
    "base_num_kv_heads=2",
    "head_dim=8",
    "base_mlp_dim=48",
    "base_num_decoder_layers=2",
    "dtype=float32",
    "matmul_precision=highest",
    "attention=dot_product",
    "learning_rate=0.01",
    "warmup_steps_fraction=0",
]
SHARDED = ["ici_data_parallelism=2", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2"]
BATCH, SEQUENCE = (
    ("activation_embed_and_logits_batch", "activation_batch", "activation_batch_attn"),
    ("activation_norm_length", "activation_length", "activation_length_attn"),
)
EVAL_RULES = [
    "logical_axis_rules_for_eval="
    + json.dumps([[name, ["data"]] for name in BATCH] + [[name, ["fsdp"]] for name in SEQUENCE])
]
MESHES = [
    SHARDED,
    ["ici_fsdp_parallelism=-1"],
    ["dcn_data_parallelism=2", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2"],
    ["dcn_data_parallelism=1", "dcn_fsdp_parallelism=2", "ici_fsdp_parallelism=4"],
    [
        "dcn_data_parallelism=2",
        "dcn_fsdp_parallelism=2",
        "ici_data_parallelism=2",
        "ici_fsdp_parallelism=1",
    ],
]


def batch():
    """Rows of two documents and padding."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 64, (ROWS, LENGTH + 1))
    segments, positions = np.zeros((ROWS, LENGTH), int), np.zeros((ROWS, LENGTH), int)
    for row in range(ROWS):
        end = int(rng.integers(4, 10))
        segments[row, :end], positions[row, :end] = 1, np.arange(end)
        segments[row, end:14], positions[row, end:14] = 2, np.arange(14 - end)
    fields = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
    for name in ("inputs", "targets"):
        fields |= {f"{name}_position": positions, f"{name}_segmentation": segments}
    return {name: field.astype(np.int32) for name, field in fields.items()}


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    file = tmp_path_factory.mktemp("eight") / "weights.npz"
    job = {
        "meshes": MESHES,
        "eval_rules": EVAL_RULES,
        "train": [*MODEL, *SHARDED, f"per_device_batch_size={ROWS // 8}"],
        "batch": {name: field.tolist() for name, field in batch().items()},
        "path": str(file),
    }
    done = run_python(
        "-m", "tests.sharding.eight_devices", json.dumps(job), environment=cpu_devices(8)
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert results["devices"] == 8
    return results, dict(np.load(file))


@pytest.mark.slow
def test_evaluation_has_its_own_rules(eight):
    """Rows split over data and sequences over fsdp, where training splits rows over both."""
    plain, own = eight[0]["evaluate"]
    assert plain["part"] == [ROWS // 4, LENGTH]
    assert own["part"] == [ROWS // 2, LENGTH // 2]
    assert own["loss"] == pytest.approx(plain["loss"], rel=1e-6)


@pytest.mark.slow
def test_mesh_shapes_and_device_order(eight):
    plain, inferred, dcn_data, dcn_fsdp, both = eight[0]["meshes"]
    assert plain["shape"] == {"data": 2, "fsdp": 2, "tensor": 2}
    assert inferred["shape"] == {"fsdp": 8}
    # Slices are the first and the second four devices: a DCN axis crosses them, an ICI axis does
    # not.
    assert dcn_data["shape"] == {"data": 2, "fsdp": 2, "tensor": 2}
    assert dcn_data["ids"] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert dcn_fsdp["shape"] == {"fsdp": 8}
    assert dcn_fsdp["ids"] == [0, 1, 2, 3, 4, 5, 6, 7]
    # Four slices of two: data is 2 between slices times 2 inside, fsdp 2 between.
    assert both["shape"] == {"data": 4, "fsdp": 2}
    assert both["ids"] == [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.fixture(scope="module")
def single():
    """(losses, weights) after the same two steps on one device of this process."""
    config = load(None, [*MODEL, f"per_device_batch_size={ROWS}"], environ={}, devices=Devices(1))
    template = make_template(config)
    rules = AxisRules.from_config(config, make_mesh(config, jax.devices()[:1]))
    context = RunContext(
        rules=rules,
        objective=LanguageModelObjective(config, template),
        optimizer=build_optimizer(config, template.axes),
        row_format=DOCUMENTS,
        batches=RowBatches(),
    )
    state, step = initial_state(context), compile_train_step(context, ROWS)
    losses = []
    for _ in range(2):
        state, metrics = step(state, to_devices(context, batch()), context.key)
        losses.append(float(metrics["loss"]))
    return losses, {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(state.weights)
    }


@pytest.mark.slow
def test_training_equals_one_device(eight, single):
    results, weights = eight
    losses, expected = single
    np.testing.assert_allclose(results["train"]["losses"], losses, rtol=1e-5)
    assert losses[0] != losses[1]
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_weights_and_moments_are_sharded(eight):
    train = eight[0]["train"]
    layer = "['layers'][0]['blocks'][0]"
    expected = {  # fsdp and tensor halve a dimension each; replicated over data
        f"{layer}['attention']['query']['weight']": ([16, 2, 2, 8], [32, 2, 4, 8]),
        f"{layer}['attention']['key']['weight']": ([16, 2, 1, 8], [32, 2, 2, 8]),
        f"{layer}['attention']['out']['weight']": ([2, 2, 8, 16], [4, 2, 8, 32]),
        f"{layer}['mlp']['wi_0']['weight']": ([16, 2, 24], [32, 2, 48]),
        f"{layer}['mlp']['wo']['weight']": ([24, 2, 16], [48, 2, 32]),
        "['embedder']['embedding']": ([32, 16], [64, 32]),
        "['head']['weight']": ([16, 32], [32, 64]),
    }
    for name, shapes in expected.items():
        assert tuple(train["weights"][name]) == shapes, name
        moments = [tuple(both) for path, both in train["moments"].items() if path.endswith(name)]
        assert moments == [shapes, shapes], name  # Adam's two, like their weight
