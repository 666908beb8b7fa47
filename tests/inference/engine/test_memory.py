"""The size of an engine by the memory that is free, with memory that a test makes up."""

import functools
import json
import math
import subprocess
import sys

import jax
import pytest

from maxtext.common.errors import ConfigError
from maxtext.common.hardware import GIB
from maxtext.inference.engine import memory, shapes
from maxtext.inference.engine.engine import InferenceEngine
from maxtext.inference.engine.memory import Capacity, EngineSizer, Temporaries
from maxtext.inference.engine.programs import Programs
from maxtext.sharding.topology import DeviceMemory
from tests.support.random_requests import (
    LENGTH,
    compiled,
    configuration,
    new_request,
    random_weights,
)

BLOCK = 4  # tokens
PAGED = ("attention=paged", "pagedattn_num_pages=0", f"pagedattn_tokens_per_page={BLOCK}")
TEMPORARIES = Temporaries(prefill=20_000, decode=5_000)


def token_bytes(config):
    """Keys and values of a token, in all layers."""
    heads = config.base_num_kv_heads * config.head_dim
    return 2 * config.base_num_decoder_layers * heads * jax.numpy.dtype(config.dtype.value).itemsize


@functools.cache
def slot_bytes():
    """Of a slot besides keys and values: the difference between states of three and of two slots
    with the same blocks."""
    programs = compiled("causal", *PAGED)

    def total(slots):
        cache_config = memory.make_cache_config(programs, slots, LENGTH, 8)
        with programs.context():
            state = programs.init_state(cache_config)
        return sum(array.nbytes for array in jax.tree.leaves(state))

    return total(3) - total(2)


def sizer_of(programs, **options):
    weights = random_weights("causal")
    return EngineSizer(programs, weights, weights, LENGTH, **options)


@pytest.fixture
def free(monkeypatch):
    """Sets the free memory; programs have TEMPORARIES, and are not small."""

    def set_free(free_bytes, temporaries=TEMPORARIES):
        monkeypatch.setattr(memory, "free_memory", lambda utilization: free_bytes)
        monkeypatch.setattr(memory, "OBVIOUS_PART", 0)
        monkeypatch.setattr(EngineSizer, "temporaries", lambda *args: temporaries)

    return set_free


@pytest.mark.parametrize("fraction", [0.9, 0.5])
def test_blocks_are_as_many_as_fit_beside_the_temporaries(free, fraction):
    programs = compiled("causal", *PAGED, f"kv_cache_memory_fraction={fraction}")
    slots, free_bytes = 6, 100_000
    free(free_bytes)
    size = sizer_of(programs).size(slots, None)
    available = fraction * (free_bytes - TEMPORARIES.prefill) - slots * slot_bytes()
    expected = math.floor(available / (BLOCK * token_bytes(programs.config)))
    assert LENGTH // BLOCK < expected < slots * LENGTH // BLOCK
    assert size.cache_config.total_blocks == expected
    assert (size.cache_config.slots, size.max_batched_tokens) == (slots, None)


def test_blocks_are_at_most_what_sequences_and_idle_prefixes_can_use(free):
    free(100 * GIB)
    blocks = sizer_of(compiled("causal", *PAGED)).size(6, None).cache_config.total_blocks
    assert blocks == 6 * LENGTH // BLOCK
    caching = (*PAGED, "enable_prefix_caching=true")
    assert sizer_of(compiled("causal", *caching)).size(6, None).cache_config.total_blocks == (
        2 * 6 * LENGTH // BLOCK
    )
    few = (
        *caching,
        f"prefix_caching_hbm_byte={5 * BLOCK * token_bytes(compiled('causal').config)}",
    )
    assert sizer_of(compiled("causal", *few)).size(6, None).cache_config.total_blocks == (
        6 * LENGTH // BLOCK + 5
    )


def test_size_that_does_not_fit_is_refused_with_one_that_does(free):
    """A tenth more than the error names does not fit."""
    cases = [
        (["attention=paged", "pagedattn_num_pages={}", "pagedattn_tokens_per_page=4"], 500),
        (["per_device_batch_size={}"], 384),
    ]
    free(500_000)
    for keys, too_many in cases:

        def size(count, keys=keys):
            programs = compiled("causal", *(key.format(count) for key in keys))
            slots = programs.config.global_batch_size_to_load if len(keys) == 1 else 6
            return sizer_of(programs).size(slots, None)

        with pytest.raises(ConfigError, match=r"[KM]iB on each device, but .* are left") as refusal:
            size(too_many)
        key, _, value = str(refusal.value).rpartition(": ")[2].partition(" fits")[0].partition("=")
        assert any(word.startswith(key + "=") for word in keys)
        fitting = int(value)
        assert 1 < fitting < too_many
        size(fitting)
        with pytest.raises(ConfigError):
            size(math.ceil(1.1 * fitting))


def test_length_that_does_not_fit_is_refused_with_one_that_does(free):
    programs = compiled("causal")
    free(TEMPORARIES.prefill + 10_000)
    with pytest.raises(ConfigError, match=r"for a sequence of 64 tokens.*max_target_l") as e:
        sizer_of(programs, fits_slots=True).size(8, None)
    length = int(str(e.value).rpartition("max_target_length=")[2].split()[0])
    assert 0 < length < LENGTH
    for tokens, fits in ((length, True), (math.ceil(1.1 * length), False)):
        needed = tokens * token_bytes(programs.config) + slot_bytes()
        assert (needed <= 0.9 * 10_000) == fits


def test_slots_are_halved_until_their_caches_fit(free):
    programs = compiled("causal")
    sequence = LENGTH * token_bytes(programs.config) + slot_bytes()
    for slots in (16, 9, 8, 7):
        free(TEMPORARIES.prefill + math.ceil(slots * sequence / 0.9))
        size = sizer_of(programs, fits_slots=True).size(16, None)
        assert size.cache_config.slots == 1 << (slots.bit_length() - 1)


def test_tokens_of_a_prefill_batch_are_halved_until_temporaries_fit(free, monkeypatch):
    """With temporaries in proportion to the tokens, as 60 GiB for 4096 tokens."""
    token = 60 * GIB // 4096
    free(30 * GIB)
    monkeypatch.setattr(
        EngineSizer,
        "temporaries",
        lambda self, slots, limit: Temporaries((limit or 4096) * token, decode=1000),
    )
    programs = compiled("causal", *PAGED)
    assert sizer_of(programs).size(6, None).max_batched_tokens == 1024  # with all caches
    free_bytes = 3_000_000
    token = free_bytes // 1000
    free(free_bytes)
    monkeypatch.setattr(
        EngineSizer,
        "temporaries",
        lambda self, slots, limit: Temporaries((limit or 4096) * token, decode=1000),
    )
    size = sizer_of(compiled("causal", *PAGED)).size(1000, None)
    assert size.max_batched_tokens == 128  # no quarter of the memory: 256 tokens take 0.256 of it
    assert size.cache_config.total_blocks < 1000 * LENGTH // BLOCK


def test_engine_that_measures_its_programs_generates_the_same(monkeypatch):
    """Of memory that is too little to be sure without compiling them; what the sizer has compiled
    is not compiled again."""
    requests = [new_request([5, 9, 11], 6), new_request([7] * 20, 6)]
    expected = InferenceEngine(compiled("causal"), random_weights("causal"), 2, LENGTH)
    base = compiled("causal", *PAGED)
    programs = Programs(base.config, base.template, base.rules, base.build)
    free_bytes = 2**20
    monkeypatch.setattr(memory, "free_memory", lambda utilization: free_bytes)
    engine = InferenceEngine(programs, random_weights("causal"), 2, LENGTH)
    assert programs.num_compiled > 0
    state = sum(array.nbytes for array in jax.tree.leaves(engine.executor.state))
    assert state <= 0.9 * free_bytes
    assert engine.generate(requests) == expected.generate(requests)


def test_small_engines_compile_nothing(monkeypatch):
    base = compiled("causal", *PAGED)
    programs = Programs(base.config, base.template, base.rules, base.build)
    monkeypatch.setattr(memory, "free_memory", lambda utilization: 2 * GIB)
    InferenceEngine(programs, random_weights("causal"), 2, LENGTH)
    assert programs.num_compiled == 0


def test_prefill_batches_have_no_more_rows_than_their_limit():
    """Where there are few programs, rows are padded up to the most of a batch."""
    assert shapes.prefill_rows(9, 64, 256, few_programs=True) == 64
    assert shapes.prefill_rows(9, 64, 256, few_programs=True, max_tokens=1024) == 16


def test_memory_of_others_and_the_utilization_limit_an_engine(monkeypatch):
    def free_with(used, free, utilization):
        device = DeviceMemory(total=16 * GIB, used=used, free=free)
        monkeypatch.setattr(memory, "device_memory", lambda *args: device)
        return memory.free_memory(utilization)

    assert free_with(used=4 * GIB, free=12 * GIB, utilization=1.0) == 12 * GIB
    assert free_with(used=4 * GIB, free=5 * GIB, utilization=1.0) == 5 * GIB  # others have 7
    assert free_with(used=4 * GIB, free=12 * GIB, utilization=0.5) == 4 * GIB
    assert free_with(used=4 * GIB, free=12 * GIB, utilization=0.2) == 0


def test_default_batch_size_is_a_limit():
    assert Capacity.from_config(configuration()).fits_slots == (
        not configuration().source("per_device_batch_size").is_user
    )
    assert not Capacity.from_config(configuration("per_device_batch_size=3")).fits_slots


@pytest.mark.slow
def test_process_with_little_memory_generates():
    """A limit of the address space, as `ulimit -v` sets it."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.inference.engine.limited_memory"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    engine = InferenceEngine(compiled("causal"), random_weights("causal"), 3, LENGTH)
    assert result["tokens"] == engine.generate([new_request([5, 9, 11], 6)])
    assert "pagedattn_num_pages=262144 of 64 tokens need 4.00 GiB on each device" in result["error"]
    assert 2**28 < result["bytes"] < 2**31
