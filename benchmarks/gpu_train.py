"""Training on one GPU against a PyTorch model under torch.compile, both with random data.

    python benchmarks/gpu_train.py [--cases default,fp8,fp8_full,int8,8b,moe8,moe64] [--steps 30]

Runs `maxtext train` with the overrides below, and the peer, the PyTorch model in this file: SDPA,
autocast to bfloat16 on float32 weights, fused AdamW, clipping by the global norm, with the shapes
of `default`; it stays in bfloat16 for the fp8 and int8 cases of the same shapes. Each runs in its
own process.

- Step time: from one report to the next, the median of all but the first ten.
- TFLOP/s: of matmuls, with causal attention counted once and of experts those that a token uses;
  MFU is relative to 989, the dense bfloat16 peak of an H100 or H200.
- First step: from the command to its report, with an empty compilation cache, and again with a warm
  one; modules have been imported once before, so that the disk is not timed.
- Memory: of the compiled step, from the run's banner; for the peer, the maximum allocated.

Prints one JSON line.
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

PEAK_TFLOPS = 989
WARMUP_STEPS = 10  # that are not timed
STEPS_PER_TIMING = 5  # of the peer
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
QUANTIZED_CASES = ("fp8", "fp8_full", "int8")  # with the shapes of `default`
PEERS = {
    "default": {
        "rows": 12,
        "length": 2048,
        "embed_dim": 2048,
        "layers": 16,
        "heads": 16,
        "hidden_dim": 7168,
        "vocabulary": 32000,
    },
    "tiny": {
        "rows": 2,
        "length": 64,
        "embed_dim": 64,
        "layers": 2,
        "heads": 4,
        "hidden_dim": 128,
        "vocabulary": 256,
    },
}


def run_maxtext(overrides: list[str], steps: int, folder: Path) -> dict[str, float]:
    """One run of the trainer: seconds to the first step, the median step, TFLOP/s."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    outputs = [
        f"jax_cache_dir={folder / 'cache'}",
        f"base_output_directory={folder}",
        f"metrics_file={metrics}",
    ]
    command = [sys.executable, "-m", "maxtext.train", *COMMON, *overrides, *outputs]
    command.append(f"steps={steps}")
    start, first = time.time(), None
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log = []
    for line in process.stdout:
        log.append(line)
        if first is None and line.startswith("step 0/"):
            first = time.time() - start
    if process.wait():
        raise SystemExit("".join(log[-40:]))
    records = [json.loads(record) for record in metrics.read_text().splitlines()]
    timed = [
        record
        for record in records
        if record.get("step_time_seconds") and record["step"] >= WARMUP_STEPS
    ]
    if not timed:  # a run of one step
        return {"first_step_seconds": round(first, 1)}
    memory = re.search(r"memory a device\W+([\d.]+ \w+)", "".join(log))
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


def run_peer(case: str, steps: int, started: float) -> dict[str, float]:
    import torch
    from torch import nn
    from torch.nn import functional

    sizes = PEERS[case]
    rows, length, embed_dim, heads = (
        sizes[name] for name in ("rows", "length", "embed_dim", "heads")
    )
    head_dim, device = embed_dim // heads, "cuda" if torch.cuda.is_available() else "cpu"

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm = nn.RMSNorm(embed_dim, eps=1e-5)
            self.mlp_norm = nn.RMSNorm(embed_dim, eps=1e-5)
            self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=False)
            self.out = nn.Linear(embed_dim, embed_dim, bias=False)
            self.gate_up = nn.Linear(embed_dim, 2 * sizes["hidden_dim"], bias=False)
            self.down = nn.Linear(sizes["hidden_dim"], embed_dim, bias=False)

        def forward(self, x, cosine, sine):
            qkv = self.qkv(self.attention_norm(x)).view(rows, length, 3, heads, head_dim)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)

            def rotate(x):
                left, right = x.chunk(2, -1)
                return torch.cat(
                    [left * cosine - right * sine, right * cosine + left * sine], -1
                ).to(v.dtype)

            context = functional.scaled_dot_product_attention(
                rotate(q), rotate(k), v, is_causal=True
            )
            x = x + self.out(context.transpose(1, 2).reshape(rows, length, embed_dim))
            gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
            return x + self.down(functional.silu(gate) * up)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(sizes["vocabulary"], embed_dim)
            self.blocks = nn.ModuleList(Block() for _ in range(sizes["layers"]))
            self.norm = nn.RMSNorm(embed_dim, eps=1e-5)
            self.head = nn.Linear(embed_dim, sizes["vocabulary"], bias=False)
            angles = torch.outer(
                torch.arange(length), 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
            )
            self.register_buffer("cosine", angles.cos())
            self.register_buffer("sine", angles.sin())

        def forward(self, ids, targets):
            x = self.embed(ids).to(torch.bfloat16)  # the residual, as in maxtext
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
        elif step % STEPS_PER_TIMING == 0:  # the host may run ahead in between, as in maxtext
            loss.item()
            times.append((time.perf_counter() - start) / STEPS_PER_TIMING)
            start = time.perf_counter()
    weights = (
        sum(parameter.numel() for parameter in model.parameters()) - sizes["vocabulary"] * embed_dim
    )
    attention = 2 * sizes["layers"] * embed_dim * length  # of a token, forward, causal
    flops = rows * length * 3 * (2 * weights + attention)
    seconds = statistics.median(times[WARMUP_STEPS // STEPS_PER_TIMING :] or times)
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
    if options.steps < WARMUP_STEPS + 2 * STEPS_PER_TIMING:
        parser.error(f"--steps must be at least {WARMUP_STEPS + 2 * STEPS_PER_TIMING}")
    if options.peer:
        print(json.dumps(run_peer(options.peer, options.steps, options.started)))
        return
    results = {}
    # Read the modules from the disk once.
    subprocess.run([sys.executable, "-c", "import maxtext.trainers.train"], check=True)
    for case in options.cases.split(","):
        with tempfile.TemporaryDirectory() as folder:
            result = run_maxtext(CASES[case], options.steps, Path(folder))
            result["mfu"] = round(result["tflops"] / PEAK_TFLOPS, 3)
            if case in PEERS:
                warm = run_maxtext(CASES[case], 1, Path(folder))
                result["first_step_seconds_warm"] = warm["first_step_seconds"]
                command = [sys.executable, __file__, "--peer", case, "--steps", str(options.steps)]
                done = subprocess.run(
                    [*command, "--started", str(time.time())],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                    env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"},
                )
                result["peer"] = json.loads(done.stdout.splitlines()[-1])
        peer = result.get("peer")
        if peer is None and case in QUANTIZED_CASES:
            peer = results.get("default", {}).get("peer")
        if peer:
            result["ratio"] = round(peer["step_seconds"] / result["step_seconds"], 3)
        results[case] = result
        print(case, result, file=sys.stderr, flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
