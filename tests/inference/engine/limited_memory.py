"""A process with 2 GiB of address space beyond what JAX has taken: it generates, refuses caches
that do not fit, and generates with those that the error names. Prints tokens and the error."""

import json
import resource

from maxtext.common.errors import ConfigError
from maxtext.common.hardware import GIB, process_bytes
from maxtext.inference.engine.engine import InferenceEngine
from tests.support.random_requests import compiled, new_request, random_weights


def build(num_blocks):
    keys = ("attention=paged", f"pagedattn_num_pages={num_blocks}", "pagedattn_tokens_per_page=64")
    return InferenceEngine(compiled("causal", *keys), random_weights("causal"), 3, 64)


request = new_request([5, 9, 11], 6)
tokens = [build(0).generate([request])]
limit = process_bytes()[0] + 2 * GIB
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
tokens.append(build(0).generate([request]))
try:
    build(4 * GIB // (64 * 256))  # a token takes 256 bytes
    error = ""
except ConfigError as refusal:
    error = str(refusal)
fitting = int(error.rpartition("pagedattn_num_pages=")[2].split()[0])
tokens.append(build(fitting).generate([request]))
print(json.dumps({"tokens": tokens, "error": error, "bytes": fitting * 64 * 256}))
