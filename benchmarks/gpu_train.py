"""Training on one GPU, against a plain PyTorch model under torch.compile, both with random data.

    python benchmarks/gpu_train.py [--cases default,fp8,fp8_full,int8,8b,moe8,moe64] [--steps 30]

Ours is `maxtext train` with the words below; the peer is the model in this file: SDPA, autocast to
bfloat16 on float32 weights, fused AdamW, clipping by the global norm, with the shapes of `default`;
it stays in bfloat16 where ours, with the same shapes, is in fp8 or int8. Each side runs in a
process of its own. A step counts from one report to the next; the median of all but the first ten
counts. TFLOP/s are those of the matrix products, causal attention once, of experts those that a
token uses; MFU is of 989, the dense bfloat16 peak of an H100 or H200. First step: from the command
to its report, with an empty compilation cache, and again with the one that this left; modules have
been imported once before, so that no disk is timed. Memory: ours, of the compiled step, as the
run's banner has it; the peer's, the most that was allocated. Prints one JSON line.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PEAK = 989
SKIPPED = 10  # steps, while clocks and caches settle
STEPS_PER_TIMING = 5  # steps of the peer that are timed together
COMMON = [
    "dataset_type=synthetic",
    "enable_checkpointing=false",
    "enable_tensorboard=false",
    "run_name=gpu_train",
    "learning_rate_schedule_steps=1000",
]
DENSE = ["per_device_batch_size=12", "max_target_length=2048", "remat_policy=none"]
EXPERTS = [
    "decoder_block=mixtral",
    "per_device_batch_size=16",
    "max_target_length=2048",
    "remat_policy=none",
    "base_emb_dim=2048",
    "base_num_decoder_layers=8",
    "base_num_query_heads=16",
    "base_num_kv_heads=16",
    "head_dim=128",
    "vocab_size=32000",
]
CASES = {
    "default": DENSE,
    "fp8": [*DENSE, "quantization=fp8"],
    "fp8_full": [*DENSE, "quantization=fp8_full"],
    "int8": [*DENSE, "quantization=int8"],
    "8b": [
        "model_name=llama3.1-8b",
        "per_device_batch_size=2",
        "max_target_length=8192",
        "mu_dtype=bfloat16",
        "remat_policy=minimal_with_context",
        "num_vocab_tiling=8",
    ],
    "moe8": [
        *EXPERTS,
        "num_experts=8",
        "num_experts_per_tok=2",
        "base_mlp_dim=7168",
        "base_moe_mlp_dim=7168",
    ],
    "moe64": [
        *EXPERTS,
        "num_experts=64",
        "num_experts_per_tok=6",
        "base_mlp_dim=1408",
        "base_moe_mlp_dim=1408",
    ],
    "tiny": [
        "per_device_batch_size=2",
        "max_target_length=64",
        "base_emb_dim=64",
        "base_num_decoder_layers=2",
        "base_num_query_heads=4",
        "base_num_kv_heads=4",
        "head_dim=16",
        "base_mlp_dim=128",
        "vocab_size=256",
        "remat_policy=none",
    ],
}
QUANTIZED_CASES = ("fp8", "fp8_full", "int8")  # of the shapes of `default`
PEERS = {
    "default": {
        "rows": 12,
        "length": 2048,
        "size": 2048,
        "layers": 16,
        "heads": 16,
        "mlp": 7168,
        "vocabulary": 32000,
    },
    "tiny": {
        "rows": 2,
        "length": 64,
        "size": 64,
        "layers": 2,
        "heads": 4,
        "mlp": 128,
        "vocabulary": 256,
    },
}


def run_maxtext(overrides: list[str], steps: int, folder: Path) -> dict[str, float]:
    """One run of the trainer: seconds to the first step, the median step, TFLOP/s."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    folders = [
        f"jax_cache_dir={folder / 'cache'}",
        f"base_output_directory={folder}",
        f"metrics_file={metrics}",
    ]
    line = [sys.executable, "-m", "maxtext.train", *COMMON, *overrides, *folders, f"steps={steps}"]
    start, first = time.time(), None
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = []
    for said_line in process.stdout:
        said.append(said_line)
        if first is None and said_line.startswith("step 0/"):
            first = time.time() - start
    if process.wait():
        raise SystemExit("".join(said[-40:]))
    records = [json.loads(record) for record in metrics.read_text().splitlines()]
    timed = [
        record
        for record in records
        if record.get("step_time_seconds") and record["step"] >= SKIPPED
    ]
    if not timed:  # only the first step was asked for
        return {"first_step_seconds": round(first, 1)}
    memory = re.search(r"memory a device\W+([\d.]+ \w+)", "".join(said))
    return {
        "first_step_seconds": round(first, 1),
        "memory": memory.group(1) if memory else None,
        "step_seconds": round(
            statistics.median(record["step_time_seconds"] for record in timed), 4
        ),
        "tflops": round(
            statistics.median(record["tflops_per_second_per_device"] for record in timed), 1
        ),
    }


def peer(case: str, steps: int, started: float) -> dict[str, float]:
    import torch
    from torch import nn
    from torch.nn import functional

    sizes = PEERS[case]
    rows, length, size, heads = (sizes[name] for name in ("rows", "length", "size", "heads"))
    head, device = size // heads, "cuda" if torch.cuda.is_available() else "cpu"

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.RMSNorm(size, eps=1e-5), nn.RMSNorm(size, eps=1e-5)
            self.qkv, self.out = (
                nn.Linear(size, 3 * size, bias=False),
                nn.Linear(size, size, bias=False),
            )
            self.gate_up = nn.Linear(size, 2 * sizes["mlp"], bias=False)
            self.down = nn.Linear(sizes["mlp"], size, bias=False)

        def forward(self, x, cosine, sine):
            q, k, v = (
                self.qkv(self.first(x)).view(rows, length, 3, heads, head).permute(2, 0, 3, 1, 4)
            )

            def rotate(x):
                left, right = x.chunk(2, -1)
                return torch.cat(
                    [left * cosine - right * sine, right * cosine + left * sine], -1
                ).to(v.dtype)

            mixed = functional.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, size))
            gate, up = self.gate_up(self.second(x)).chunk(2, -1)
            return x + self.down(functional.silu(gate) * up)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(sizes["vocabulary"], size)
            self.blocks = nn.ModuleList(Block() for _ in range(sizes["layers"]))
            self.norm = nn.RMSNorm(size, eps=1e-5)
            self.head = nn.Linear(size, sizes["vocabulary"], bias=False)
            angles = torch.outer(
                torch.arange(length), 10000.0 ** (-torch.arange(0, head, 2) / head)
            )
            self.register_buffer("cosine", angles.cos())
            self.register_buffer("sine", angles.sin())

        def forward(self, ids, targets):
            x = self.embed(ids).to(torch.bfloat16)  # the stream of residuals, as ours is
            for block in self.blocks:
                x = block(x, self.cosine, self.sine)
            logits = self.head(self.norm(x))
            return functional.cross_entropy(
                logits.float().view(-1, sizes["vocabulary"]), targets.reshape(-1)
            )

    torch.set_float32_matmul_precision("high")
    with torch.device(device):
        model = Model()
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    times, first, start = [], 0.0, 0.0
    for step in range(steps + 1):
        start = time.perf_counter() if step == 1 else start
        ids = torch.randint(sizes["vocabulary"], (rows, length + 1), device=device)
        with torch.autocast(device, torch.bfloat16):
            loss = compiled(ids[:, :-1], ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 0:
            loss.item()
            first = time.time() - started
        elif step % STEPS_PER_TIMING == 0:  # the host may run ahead in between, as ours does
            loss.item()
            times.append((time.perf_counter() - start) / STEPS_PER_TIMING)
            start = time.perf_counter()
    weights = (
        sum(parameter.numel() for parameter in model.parameters()) - sizes["vocabulary"] * size
    )
    attention = 2 * sizes["layers"] * size * length  # a token, forward, half of the square
    flops = rows * length * 3 * (2 * weights + attention)
    seconds = statistics.median(times[SKIPPED // STEPS_PER_TIMING :] or times)
    memory = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {
        "first_step_seconds": round(first, 1),
        "memory": f"{memory / 2**30:.1f} GiB",
        "step_seconds": round(seconds, 4),
        "tflops": round(flops / seconds / 1e12, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="default,fp8,fp8_full,int8,8b,moe8,moe64")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < SKIPPED + 2 * STEPS_PER_TIMING:
        parser.error(f"--steps must be at least {SKIPPED + 2 * STEPS_PER_TIMING}")
    if options.peer:
        print(json.dumps(peer(options.peer, options.steps, options.started)))
        return
    result = {}
    subprocess.run(
        [sys.executable, "-c", "import maxtext.trainers.pretrain"], check=True
    )  # read from the disk once
    for case in options.cases.split(","):
        with tempfile.TemporaryDirectory() as folder:
            metrics = run_maxtext(CASES[case], options.steps, Path(folder))
            metrics["mfu"] = round(metrics["tflops"] / PEAK, 3)
            if case in PEERS:
                warm = run_maxtext(CASES[case], 1, Path(folder))
                metrics["first_step_seconds_warm"] = warm["first_step_seconds"]
                line = [sys.executable, __file__, "--peer", case, "--steps", str(options.steps)]
                done = subprocess.run(
                    [*line, "--started", str(time.time())],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                    env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"},
                )
                metrics["peer"] = json.loads(done.stdout.splitlines()[-1])
        peer_metrics = metrics.get("peer") or (
            result.get("default", {}).get("peer") if case in QUANTIZED_CASES else None
        )
        if peer_metrics:
            metrics["ratio"] = round(peer_metrics["step_seconds"] / metrics["step_seconds"], 3)
        result[case] = metrics
        print(case, metrics, file=sys.stderr, flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
