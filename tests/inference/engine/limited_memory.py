"""A process with 2 GiB of address space beyond what it has taken: it refuses caches that do not
fit, and generates with those that the error names. Prints the new tokens and the error."""

import json
import resource

import jax.numpy as jnp

from maxtext.common.errors import ConfigError
from maxtext.common.hardware import GIB, process_bytes
from maxtext.inference.engine.engine import InferenceEngine
from tests.support.random_requests import compiled, new_request, random_weights

KEYS = ("attention=paged", "pagedattn_tokens_per_page=64")
weights = random_weights("causal")
jnp.zeros(1).block_until_ready()
limit = process_bytes()[0] + 2 * GIB
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def build(num_blocks):
    programs = compiled("causal", *KEYS, f"pagedattn_num_pages={num_blocks}")
    return InferenceEngine(programs, weights, 3, 64)


error = ""
try:
    build(4 * GIB // (64 * 256))  # a token takes 256 bytes
except ConfigError as refusal:
    error = str(refusal)
fitting = int(error.rpartition("pagedattn_num_pages=")[2].split()[0])
tokens = build(fitting).generate([new_request([5, 9, 11], 6)])
print(json.dumps({"tokens": tokens, "error": error, "bytes": fitting * 64 * 256}))
