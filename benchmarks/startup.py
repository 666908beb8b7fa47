"""How long from the command to the first finished step, and how close a steady step is to bare JAX.

    python benchmarks/startup.py [--steps 200]

The run is small (4 layers of width 64, vocabulary 256, 8 sequences of 64 tokens, float32, synthetic
data), so what is measured is the framework. Cold: an empty compilation cache. Warm: the same
command again. Steady: the median time of a step of `maxtext train` against a bare jitted loop of
the same model, optimizer and batch size, written here without this package; both in turn, three
times, and the better median of each counts. Prints one JSON line.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OVERRIDES = [
    "run_name=startup", "dataset_type=synthetic", "enable_checkpointing=false",
    "enable_tensorboard=false", "base_emb_dim=64", "base_num_query_heads=4", "base_num_kv_heads=4",
    "head_dim=16", "base_mlp_dim=128", "base_num_decoder_layers=4", "vocab_size=256",
    "max_target_length=64", "per_device_batch_size=8", "dtype=float32", "remat_policy=none",
]  # fmt: skip

BARE = """
import sys, time, statistics
import jax, jax.numpy as jnp, numpy as np, optax
L, E, H, D, M, V, B, S = 4, 64, 4, 16, 128, 256, 8, 64
def init(key):
    k = iter(jax.random.split(key, 16))
    n = lambda *s: jax.random.normal(next(k), s) * 0.1
    layer = dict(q=n(L, E, H, D), k=n(L, E, H, D), v=n(L, E, H, D), o=n(L, H, D, E),
                 g=n(L, E, M), u=n(L, E, M),
                 d=n(L, M, E), n1=jnp.ones((L, E)), n2=jnp.ones((L, E)))
    return dict(embed=n(V, E), head=n(E, V), norm=jnp.ones(E), layer=layer)
def norm(x, w): return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * w
def rope(x):
    f = 1 / 10000 ** (jnp.arange(0, D, 2) / D)
    a = jnp.arange(S)[None, :, None, None] * f
    x1, x2 = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(a), jnp.sin(a)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)
def loss(p, ids, targets):
    x = p["embed"][ids]
    mask = jnp.tril(jnp.ones((S, S), bool))
    def body(x, w):
        h = norm(x, w["n1"])
        q = rope(jnp.einsum("bse,ehd->bshd", h, w["q"]))
        k = rope(jnp.einsum("bse,ehd->bshd", h, w["k"]))
        v = jnp.einsum("bse,ehd->bshd", h, w["v"])
        a = jax.nn.softmax(jnp.where(mask, jnp.einsum("bshd,bthd->bhst", q, k) / D**0.5, -1e9), -1)
        x = x + jnp.einsum("bshd,hde->bse", jnp.einsum("bhst,bthd->bshd", a, v), w["o"])
        h = norm(x, w["n2"])
        return x + (jax.nn.silu(h @ w["g"]) * (h @ w["u"])) @ w["d"], None
    x, _ = jax.lax.scan(body, x, p["layer"])
    logits = norm(x, p["norm"]) @ p["head"]
    target_logits = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - target_logits)
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-5, 0.9, 0.95, weight_decay=0.1))
@jax.jit
def step(p, s, ids, targets):
    l, g = jax.value_and_grad(loss)(p, ids, targets)
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s, l
p = init(jax.random.key(0)); s = tx.init(p)
rng = np.random.default_rng(0)
times = []
for i in range(int(sys.argv[1])):
    x = rng.integers(0, V, (B, S + 1), dtype=np.int32)
    t = time.perf_counter()
    p, s, l = step(p, s, x[:, :-1], x[:, 1:])
    l.block_until_ready()
    times.append(time.perf_counter() - t)
print(statistics.median(times[len(times) // 4:]))
"""


def train(folder: Path, steps: int, cache: str) -> tuple[float, list[float]]:
    """(seconds from the command to its first finished step, the step times)."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    overrides = [
        *OVERRIDES,
        f"steps={steps}",
        f"base_output_directory={folder}",
        f"metrics_file={metrics}",
    ]
    start = time.time()
    process = subprocess.Popen(
        [sys.executable, "-m", "maxtext.train", *overrides, f"jax_cache_dir={folder / cache}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    first = None
    for line in process.stdout:
        if first is None and line.startswith("step 0/"):
            first = time.time() - start
    if process.wait():
        raise SystemExit(process.stderr.read())
    return first, [
        json.loads(line)["step_time_seconds"] for line in metrics.read_text().splitlines()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        cold, _ = train(folder, 3, "cache")
        warm, _ = train(folder, 3, "cache")
        step_times, bare = [], []
        for _ in range(3):
            times = train(folder, steps, "cache")[1]
            step_times.append(statistics.median(times[len(times) // 4 :]))
            command = [sys.executable, "-c", BARE, str(steps)]
            result = subprocess.run(command, capture_output=True, text=True, check=True)
            bare.append(float(result.stdout))
    print(
        json.dumps(
            {
                "cold_seconds": round(cold, 2),
                "warm_seconds": round(warm, 2),
                "step_ms": round(min(step_times) * 1e3, 2),
                "bare_step_ms": round(min(bare) * 1e3, 2),
                "step_ratio": round(min(step_times) / min(bare), 3),
            }
        )
    )


if __name__ == "__main__":
    main()
