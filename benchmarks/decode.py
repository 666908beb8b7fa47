"""Tokens per second of generation, against `transformers` with a static, compiled cache, both with
random weights.

    python benchmarks/decode.py [--cases 8b:1,8b:32,default:1] [--new 256] [--prompt 128]
        [--offline 512] [--fixed 1000:1000:448:fp8]

A case is a shape and a batch size, in bfloat16: greedy completions of `batch` prompts of the same
length by `generate` of either library. The time is that of `new` tokens less that of one, so it
excludes prefill; the best of three runs. Each library runs in its own process. A case `8b:1:int8`
is maxtext with int8 weights, or in fp8 or int4, and its ratio is to maxtext in bfloat16;
`8b:1:fp8:fp8kv` also has a cache in fp8. A case may name a model instead of a shape, as
`qwen3-30b-a3b:32`: its ratio is to the rate at which the device could read the weights, keys,
values and states of a step (--bandwidth, in TB/s), and formats follow as well:
`gpt-oss-20b:1:mxfp4`. --offline N generates for N requests of mixed
lengths (prompts of 64 to 1024 tokens, completions of 64 to 512) by continuous batching and divides
the new tokens by the whole time, after one run that compiles. --fixed INPUT:OUTPUT:COUNT, with
formats after it, does the same for COUNT requests of INPUT tokens that each get OUTPUT tokens.
Prints one JSON line.
"""

import argparse
import json
import subprocess
import sys
import time

import numpy as np

SHAPES = {
    "8b": {
        "layers": 32,
        "embed": 4096,
        "heads": 32,
        "kv_heads": 8,
        "mlp": 14336,
        "vocabulary": 128256,
    },
    "default": {
        "layers": 16,
        "embed": 2048,
        "heads": 16,
        "kv_heads": 16,
        "mlp": 7168,
        "vocabulary": 32000,
    },
    "tiny": {"layers": 2, "embed": 256, "heads": 2, "kv_heads": 1, "mlp": 256, "vocabulary": 500},
}
HEAD = 128
RUNS = 3


def rate(generate, new, batch):
    """Tokens per second of `generate(count)`, without the first token of each row."""
    best = {}
    for count in (1, new):
        generate(count)
        seconds = []
        for _ in range(RUNS):
            start = time.perf_counter()
            generate(count)
            seconds.append(time.perf_counter() - start)
        best[count] = min(seconds)
    return batch * (new - 1) / (best[new] - best[1])


def prompts(shape, batch, length):
    return np.random.default_rng(0).integers(0, SHAPES[shape]["vocabulary"], (batch, length))


def peer(shape, batch, length, new):
    import torch
    import transformers

    sizes = SHAPES[shape]
    config = transformers.LlamaConfig(
        hidden_size=sizes["embed"],
        intermediate_size=sizes["mlp"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        head_dim=HEAD,
        vocab_size=sizes["vocabulary"],
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.tensor(prompts(shape, batch, length), device=device)

    def generate(count):
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                cache_implementation="static",
            )
        assert out.shape[1] == length + count
        return out.cpu()

    return rate(generate, new, batch)


def load(shape, quantization=None, **keys):
    from maxtext import LLM

    sizes = SHAPES[shape]
    settings = {
        "base_emb_dim": sizes["embed"],
        "base_num_decoder_layers": sizes["layers"],
        "head_dim": HEAD,
        "base_num_query_heads": sizes["heads"],
        "base_num_kv_heads": sizes["kv_heads"],
        "base_mlp_dim": sizes["mlp"],
        "vocab_size": sizes["vocabulary"],
        "dtype": "bfloat16",
        "weight_dtype": "bfloat16",
        "max_target_length": 2048,
        **({"quantization": quantization} if quantization else {}),
        **keys,
    }
    return LLM.load("default", **settings)


def format_keys(formats):
    """The keys for formats of weights, such as int8, and of the cache, such as int8kv."""
    keys = {}
    for name in formats:
        if name.endswith("kv"):
            kv_dtype = name.removesuffix("kv")
            keys |= {"quantize_kvcache": True, "kv_quant_dtype": kv_dtype, "kv_quant_axis": "dkv"}
        else:
            keys["quantization"] = name
    return keys


def run_maxtext(shape, batch, length, new, *formats):
    llm = load(shape, **format_keys(formats))
    ids = prompts(shape, batch, length)

    def generate(count):
        assert llm.generate(ids, max_new_tokens=count, ignore_eos=True).shape == (batch, count)

    return rate(generate, new, batch)


def run_models(model, formats, batches, length, new, bandwidth):
    """For each batch size: tokens per second of a named model in these formats, and the limit by
    the bytes that a step reads."""
    from maxtext import LLM

    keys = {"dtype": "bfloat16", "weight_dtype": "bfloat16", "max_target_length": 2048}
    llm = LLM.load(model, **keys, **format_keys(formats))
    rates = {}
    for batch in batches:
        ids = np.random.default_rng(0).integers(0, 30000, (batch, length))

        def generate(count, ids=ids, batch=batch):
            tokens = llm.generate(ids, max_new_tokens=count, ignore_eos=True)
            assert tokens.shape == (batch, count)

        limit = batch * bandwidth * 1e12 / bytes_of_step(llm, batch, length + new // 2)
        rates[batch] = rate(generate, new, batch), limit
    return rates


def bytes_of_step(llm, batch, length):
    """The bytes that a decode step of `batch` rows with caches of `length` tokens reads: each
    weight once, of experts those that random choices select on average; keys, values, latents and
    states, of which the last are written as well."""
    import jax

    from maxtext.common.trees import flatten_dict
    from maxtext.layers.specs import AttentionSpec, MlaSpec
    from maxtext.models.registry import layers

    config, total = llm.config, 0.0
    for path, array in flatten_dict(llm.weights).items():
        share = 1.0
        if "experts" in path:
            share = 1 - (1 - config.num_experts_per_tok / config.num_experts) ** batch
        elif path[0] == "embedder":
            share = 1.0 if config.logits_via_embedding else 0.0
        total += share * sum(part.nbytes for part in jax.tree.leaves(array))
    for mixer in (layer.attention for layer in layers(config)):
        if isinstance(mixer, AttentionSpec):
            tokens = min(length, mixer.mask.window or length, mixer.mask.chunk or length)
            total += batch * tokens * 4 * mixer.kv_heads * mixer.head_dim
        elif isinstance(mixer, MlaSpec):
            total += batch * length * 2 * (mixer.kv_rank + mixer.rope_dim)
        else:
            total += batch * 8 * mixer.value_heads * mixer.key_dim * mixer.value_dim
    return total


PAGES = {"attention": "paged", "pagedattn_tokens_per_page": 64}


def offline(count, shape="8b"):
    """New tokens per second of all requests together, and their number."""
    # Blocks for the average request, 832 tokens and one block more, and not for the longest one.
    llm = load(shape, per_device_batch_size=count, pagedattn_num_pages=14 * count, **PAGES)
    random = np.random.default_rng(1)
    lengths = [
        (int(random.integers(64, 1025)), int(random.integers(64, 513))) for _ in range(count)
    ]
    complete(llm, lengths)
    return complete(llm, lengths)


def fixed_lengths(shape, length, new, count, slots, *formats):
    """As `offline`, for `count` requests of one length, up to `slots` at a time. The engine sizes
    its cache."""
    keys = {"per_device_batch_size": slots, "max_target_length": 64 * ((length + new) // 64 + 2)}
    llm = load(shape, **keys, **PAGES, **format_keys(formats))
    complete(llm, [(length, 40)] * slots)
    return complete(llm, [(length, new)] * count)


def complete(llm, lengths):
    """Complete a request for each (tokens of the prompt, new tokens), and measure it."""
    from maxtext.inference import GenerationRequest, SamplingParams

    random = np.random.default_rng(2)
    requests = [
        GenerationRequest(
            random.integers(0, llm.config.vocab_size, length).tolist(),
            SamplingParams(max_new_tokens=new, ignore_eos=True),
        )
        for length, new in lengths
    ]
    start = time.perf_counter()
    tokens = sum(len(each.token_ids) for each in llm.completions(iter(requests)))
    seconds = time.perf_counter() - start
    assert tokens == sum(new for _, new in lengths)
    return {
        "requests": len(requests),
        "new_tokens": tokens,
        "seconds": round(seconds, 2),
        "tokens_a_second": tokens / seconds,
    }


def run_in_process(side, *args):
    """The result of one measurement in its own process."""
    command = [sys.executable, __file__, "--one", side, *map(str, args)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def show(result, case, own, other):
    """Add a case to the results, and print it."""
    result[case] = {
        "ours": round(own, 1),
        "other": round(other, 1),
        "ratio": round(own / other, 2),
    }
    print(case, result[case], file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default="8b:1,8b:32,default:1,8b:1:int8")
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--bandwidth", type=float, default=4.2)  # of an H200, measured
    parser.add_argument("--offline", type=int, default=0)
    parser.add_argument("--offline-shape", default="8b")  # and of --fixed
    parser.add_argument("--fixed", default="")
    parser.add_argument("--slots", type=int, default=512)  # of --fixed
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        side, *args = options.one
        sides = {
            "peer": lambda shape, batch, *rest: peer(
                shape, int(batch), options.prompt, options.new
            ),
            "ours": lambda shape, batch, *rest: run_maxtext(
                shape, int(batch), options.prompt, options.new, *rest
            ),
            "offline": lambda count, shape: offline(int(count), shape),
            "fixed": lambda length, new, count, *formats: fixed_lengths(
                options.offline_shape,
                int(length),
                int(new),
                int(count),
                options.slots,
                *formats,
            ),
            "models": lambda model, formats, *batches: run_models(
                model,
                [*filter(None, formats.split(":"))],
                [*map(int, batches)],
                options.prompt,
                options.new,
                options.bandwidth,
            ),
        }
        print(json.dumps(sides[side](*args)))
        return
    result = {}
    sizes = ("--prompt", options.prompt, "--new", options.new)
    cases = [case.split(":") for case in filter(None, options.cases.split(","))]
    named = [(shape, ":".join(formats)) for shape, _, *formats in cases if shape not in SHAPES]
    for model, formats in dict.fromkeys(named):
        batches = [
            batch for shape, batch, *rest in cases if (shape, ":".join(rest)) == (model, formats)
        ]
        bandwidth = ("--bandwidth", options.bandwidth)
        rates = run_in_process("models", model, formats, *batches, *sizes, *bandwidth)
        for batch, (own, limit) in rates.items():
            show(result, f"{model}:{batch}:{formats}".removesuffix(":"), own, limit)
    for shape, batch, *quantization in cases:
        if shape not in SHAPES:
            continue
        own = run_in_process("ours", shape, batch, *quantization, *sizes)
        if quantization:
            other = result.get(f"{shape}:{batch}", {}).get("ours") or run_in_process(
                "ours", shape, batch, *sizes
            )
        else:
            other = run_in_process("peer", shape, batch, *sizes)
        show(result, ":".join((shape, batch, *quantization)), own, other)
    if options.offline:
        result["offline"] = run_in_process("offline", options.offline, options.offline_shape)
    for case in filter(None, options.fixed.split(",")):
        more = ("--slots", options.slots, "--offline-shape", options.offline_shape)
        result[case] = run_in_process("fixed", *case.split(":"), *more)
        print(case, result[case], file=sys.stderr, flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
