"""Trainer and sampler on their own devices: the split, the sync of weights, and equal runs."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from maxtext.common.errors import ConfigError, UserError
from maxtext.configs.types.rl import RLHardware
from maxtext.trainers.methods.rl.device_split import sampler_parallelism, split_devices
from maxtext.trainers.methods.rl.weight_sync import WeightSync
from tests.compiling import cpu_devices
from tests.forked import run_python
from tests.support.distillation import save_llama
from tests.support.grpo import BYTES


def split(count, slices=1, **keys):
    result = split_devices(RLHardware(**keys), count, slices)
    return (list(result.trainer), list(result.sampler))


def test_halves_of_the_hosts():
    assert split(8) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert split(4) == ([0, 1, 2, 3], [0, 1, 2, 3])  # one host is shared
    assert split(4, chips_per_vm=1) == ([0, 1], [2, 3])
    whole = split(8, trainer_devices_fraction=1, sampler_devices_fraction=1)
    assert whole == (list(range(8)), list(range(8)))
    overlapping = split(8, chips_per_vm=2, trainer_devices_fraction=0.75)
    assert overlapping == ([0, 1, 2, 3, 4, 5], [4, 5, 6, 7])


def test_slices():
    keys = dict(num_trainer_slices=2, num_samplers_slices=1)
    assert split(12, slices=3, **keys) == (list(range(8)), [8, 9, 10, 11])
    with pytest.raises(ConfigError, match="need 3 slices, and there are 2"):
        split(8, slices=2, **keys)


@pytest.mark.parametrize(
    ("count", "keys", "message"),
    [
        (8, {"trainer_devices_fraction": 0.3}, "trainer_devices_fraction=0.3 of 2 hosts .* 0.6"),
        (8, {"sampler_devices_fraction": 0.0}, "sampler_devices_fraction=0 of 2 hosts"),
        (6, {}, "chips_per_vm=4 does not divide 6 devices"),
    ],
)
def test_fractions_that_do_not_divide(count, keys, message):
    with pytest.raises(ConfigError, match=message):
        split(count, **keys)


def parallelism(devices, data=-1, tensor=-1, expert=1):
    keys = {"data": data, "tensor": tensor, "expert": expert}
    settings = {f"rollout_{axis}_parallelism": size for axis, size in keys.items()}
    return tuple(sampler_parallelism(SimpleNamespace(**settings), devices).values())


def test_mesh_of_the_sampler():
    assert parallelism(4) == (4, 1, 1)
    assert parallelism(4, tensor=2) == (2, 2, 1)
    assert parallelism(8, data=2, expert=2) == (2, 2, 2)
    with pytest.raises(ConfigError, match="do not make the 4 devices of the sampler"):
        parallelism(4, data=3)
    with pytest.raises(ConfigError, match="rollout_data_parallelism=2"):
        parallelism(4, data=2, tensor=1)


def test_sync_copies_what_is_trained():
    weights = {"base": np.ones(3), "lora": {"a": np.ones(2), "b": np.zeros(2)}}
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: sharding, weights)
    trained = {"base": False, "lora": {"a": True, "b": True}}
    sync = WeightSync(shardings, trained, chunk_size=1)
    first = sync.copy(weights)
    second = sync.copy(jax.tree.map(lambda array: array + 1, weights))
    assert second["base"] is first["base"]  # frozen: copied once
    np.testing.assert_array_equal(second["lora"]["b"], np.ones(2))
    with pytest.raises(UserError, match="only one of trainer and sampler has lora/b$"):
        sync.copy({"base": np.ones(3), "lora": {"a": np.ones(2)}})


SCRIPT = """
import json, sys
import jax, numpy as np
from maxtext.trainers import tune
from tests.support.grpo import ROWS, RUN, share_of_low_bytes

# A small epsilon of Adam makes an update of the rounding error of a gradient of about 0.
SETTINGS = dict(batch_size=4, steps=2, learning_rate=0.01, adam_eps=1e-4, grpo_beta=0.02)
for keys in json.loads(sys.argv[2]):
    keys = RUN | SETTINGS | keys
    run = tune.grpo(sys.argv[1], ROWS * 2, rewards=[share_of_low_bytes], **keys)
    leaves = jax.tree.leaves(run.result.state.weights)
    print(json.dumps({
        "rewards": [row["reward"] for row in run.metrics],
        "weights": [np.asarray(leaf).tolist() for leaf in leaves],
        "devices": sorted({device.id for leaf in leaves for device in leaf.devices()}),
    }))
"""
SHARED = {"trainer_devices_fraction": 1.0, "sampler_devices_fraction": 1.0}
HALVES = {
    "trainer_devices_fraction": 0.5,
    "sampler_devices_fraction": 0.5,
    "rollout_tensor_parallelism": 2,
    "reshard_chunk_size": 2,
}
ONE_EACH = {
    "trainer_devices_fraction": 0.125,
    "sampler_devices_fraction": 0.125,
    "chips_per_vm": 1,
}


def run_devices(base, count, *runs):
    """The results of runs in a process with this number of devices."""
    done = run_python("-c", SCRIPT, str(base), json.dumps(runs), environment=cpu_devices(count))
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"rewards')]


@pytest.mark.slow
def test_rows_that_do_not_divide_over_the_devices(base):
    with pytest.raises(AssertionError, match="change batch_size or num_generations"):
        run_devices(base, 8, {"batch_size": 1, "num_generations": 3})


def assert_equal(actual, expected):
    np.testing.assert_allclose(actual["rewards"], expected["rewards"], rtol=1e-6)
    for one, other in zip(actual["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    save_llama(folder, layers=1, embed_dim=16, seed=0, vocab_size=BYTES)
    return folder


@pytest.mark.exhaustive
def test_halves_of_the_devices_train_like_one_each(base):
    halves, one_each = run_devices(base, 8, HALVES, ONE_EACH)
    assert one_each["devices"] == [0]
    assert_equal(halves, one_each)


@pytest.mark.slow
@pytest.mark.representative("0")
@pytest.mark.parametrize("rank", [0, 4])
def test_shared_and_split_devices_train_like_one(base, rank):
    """With adapters, only these are copied. The runs themselves compare the sampler's
    log-probabilities with the trainer's."""
    adapters = {"lora_rank": rank, "sharding_tolerance": 1.0}  # some are too small to be sharded
    (one,) = run_devices(base, 1, adapters)
    runs = [adapters | keys for keys in (SHARED, HALVES)]
    shared, halves = run_devices(base, 8, *runs)
    assert shared["devices"] == list(range(8))
    assert halves["devices"] == [0, 1, 2, 3]
    assert_equal(shared, one)
    assert_equal(halves, one)
