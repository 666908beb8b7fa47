"""Engines of small models, and random requests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.configs.derive import Devices
from maxtext.configs.sources import from_overrides
from maxtext.inference.engine.programs import Programs
from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling.params import SamplingMode, SamplingParams
from maxtext.inference.sampling.sampler import BatchedSamplingParams, sample, token_keys
from maxtext.layers.context import REFERENCE
from maxtext.layers.inputs import LayerInputs
from maxtext.models.configuration import load
from maxtext.models.transformer import make_template
from maxtext.sharding import AxisRules, make_mesh
from tests.support.decoded_models import MODELS as STEPPED
from tests.support.decoded_models import SIZES

VOCABULARY, LENGTH = 41, 64
MODELS = {
    **STEPPED,
    "learned positions": [*STEPPED["learned positions"], f"trainable_position_size={LENGTH}"],
}
KINDS = {
    **MODELS,
    "recomputed": [
        "decoder_block=llama2",
        "base_num_decoder_layers=2",
        "moba=true",
        "moba_chunk_size=4",
        "moba_topk=2",
    ],
}


def configuration(*overrides, devices=1):
    last = {
        word.partition("=")[0]: word for word in (*SIZES, f"max_target_length={LENGTH}", *overrides)
    }
    return load(None, from_overrides(last.values()), environ={}, devices=Devices(devices))


def new_request(prompt, max_new_tokens, *sampling, **params):
    """A request of token ids; `sampling` is temperature, top_k and top_p."""
    return GenerationRequest(
        tuple(prompt), SamplingParams(*sampling, max_new_tokens=max_new_tokens, **params)
    )


def programs_of(config, build=REFERENCE):
    rules = AxisRules.from_config(config, make_mesh(config))
    return Programs(config, make_template(config), rules, build)


@functools.cache
def compiled(kind, *overrides):
    """The programs of a kind, which tests share, so that they are compiled once."""
    return programs_of(configuration(*KINDS[kind], *overrides))


@functools.cache
def random_weights(kind, *overrides):
    """Larger than initial weights, so that logits differ clearly."""
    random = np.random.default_rng(0)
    shapes = make_template(configuration(*KINDS[kind], *overrides)).weights
    return jax.tree.map(
        lambda leaf: jnp.asarray(random.normal(0, 0.5, leaf.shape), leaf.dtype), shapes
    )


def reference(programs, weights):
    """The tokens of a request. What follows a token does not change its logits, so one length is
    one program.
    """

    def next_token(weights, row, count, params):
        model = programs.template.bind(weights)
        hidden, _ = model.hidden(row[None], LayerInputs(jnp.arange(LENGTH)[None]))
        # A token is sampled by its seed and its position.
        keys = token_keys(params.seed, count[None])
        logits = model.logits(hidden[:, count - 1])
        return sample(logits, keys, params, SamplingMode.TRUNCATED)[0]

    program, results = jax.jit(next_token), {}

    def tokens(request):
        if request not in results:
            params = request.params
            ids, row = list(request.prompt), np.zeros(LENGTH, np.int32)
            batched = BatchedSamplingParams.from_params([params])
            while len(ids) < len(request.prompt) + params.max_new_tokens:
                row[: len(ids)] = ids
                with programs.context():
                    ids.append(int(program(weights, row, np.int32(len(ids)), batched)))
                if ids[-1] in params.stop_token_ids:
                    break
            results[request] = ids[len(request.prompt) :]
        return results[request]

    return tokens


def random_request(random, prompts=(1, 30), counts=(1, 20), greedy=0.5, prefixes=()):
    ids = random.integers(0, VOCABULARY, random.integers(*prompts)).tolist()
    if len(prefixes) and random.random() < 0.7:
        start = prefixes[random.integers(len(prefixes))]
        ids = [*start[: random.integers(1, len(start) + 1)], *ids][: prompts[1]]
    choices = [(1.0, 0, 1.0), (2.0, 7, 1.0), (1.5, 0, 0.8), (1.5, 9, 0.7)]
    sampling = () if random.random() < greedy else choices[random.integers(4)]
    stop_ids = (int(random.integers(VOCABULARY)),) if random.random() < 0.3 else ()
    count = int(random.integers(*counts))
    seed = int(random.integers(1 << 31))
    return new_request(ids, count, *sampling, seed=seed, stop_token_ids=stop_ids)


def check_released(engine):
    """No sequence has a slot or a block."""
    assert engine.prefix_cache.pool.num_referenced == 0
    assert sorted(engine.scheduler.free_slots) == list(range(engine.cache_config.slots))


LAYOUTS = {
    "contiguous": [],
    "chunked": ["use_chunked_prefill=true", "prefill_chunk_size=7"],
    "few blocks": ["attention=paged", "pagedattn_num_pages=14", "pagedattn_tokens_per_page=4"],
    "prefixes": ["enable_prefix_caching=true", "pagedattn_tokens_per_page=4"],
    "few blocks, prefixes in host memory": [
        "attention=paged",
        "pagedattn_num_pages=16",
        "pagedattn_tokens_per_page=4",
        "enable_prefix_caching=true",
        "prefix_caching_hbm_byte=4096",
        "use_chunked_prefill=true",
        "prefill_chunk_size=9",
    ],
}
HARDEST = "few blocks, prefixes in host memory"
