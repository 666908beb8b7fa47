"""`maxtext estimate`: whether a training step fits on a target, and what would fit better; nothing
runs on a device."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from maxtext.cli import positionals
from maxtext.cli.arguments import Arguments
from maxtext.cli.compile import load_for_target
from maxtext.common.hardware import format_bytes
from maxtext.common.types import Json
from maxtext.configs.types import MaxTextConfig
from maxtext.trainers.memory.estimate import (
    Estimate,
    Plan,
    Program,
    describe_shortage,
    estimate_memory,
    suggest_plans,
)

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 110  # of tables, if the output is no terminal
TOO_SMALL = 2  # exit code


def run(arguments: Arguments) -> int:
    path, overrides = positionals.split(arguments.all_args)
    name, slices = arguments["--target"] or "", arguments["--slices"] or 0
    config, target = load_for_target(path, overrides, name, slices)
    estimate = estimate_memory(config, target, not arguments["--no-compile"])
    plans = suggest_plans(estimate, arguments["--search"])
    if arguments["--format"] == "json":
        print(json.dumps(to_json(estimate, plans), indent=2))
    else:
        show(estimate, plans)
    if estimate.fits is False:
        print(
            f"maxtext: error: {config.model_name} does not fit on {target}: "
            f"{describe_shortage(estimate)}",
            file=sys.stderr,
        )
        return TOO_SMALL
    return 0


def memory_rows(estimate: Estimate) -> list[tuple[str, int, str]]:
    """The memory of one device: (name, bytes, where the number comes from)."""
    program = estimate.program
    frozen = ("frozen reference", estimate.reference.device, "shapes and shards")
    note = "shapes; freed before an update, so only the larger of these and its temporaries counts"
    caches = ("rollout caches", estimate.rollout_caches, note)
    rows = [
        ("weights", estimate.weights.device, "shapes and shards"),
        ("optimizer", estimate.optimizer.device, "shapes and shards"),
        *([frozen] if estimate.reference.device else []),
        ("gradients", estimate.gradients, "shapes and shards; part of the temporaries"),
        ("batch", estimate.batch, "shapes and shards"),
        *([caches] if estimate.rollout_caches else []),
        (
            "saved activations",
            estimate.current.device,
            f"traced, {estimate.current.policy}; part of the temporaries",
        ),
    ]
    if program is None:
        rows.append(
            (
                "working set",
                estimate.working,
                "one layer's activations and gathered weights; a guess",
            )
        )
        rows.append(
            ("temporaries", estimate.temporaries, "gradients, saved activations, working set")
        )
    else:
        rows.append(("temporaries", program.temporaries, "compiled program"))
        rows.append(
            (
                "arguments",
                program.arguments,
                "compiled program: weights, optimizer, used parts of the batch",
            )
        )
        rows.append(
            (
                "outputs",
                program.outputs,
                f"compiled program; {format_bytes(program.aliased)} in place of arguments",
            )
        )
        if program.peak:
            used = program.peak - program.arguments
            rows.append(
                (
                    "temporaries used",
                    used,
                    "compiled program: at one time, of those that it reserves",
                )
            )
    if estimate.host:
        rows.append(("host memory", estimate.host, "what is offloaded, for one device"))
    rows.append(("needed", estimate.needed, "arguments + outputs - in place + temporaries"))
    return rows


def show(estimate: Estimate, plans: dict[str, Plan | None]) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    config, mesh = estimate.config, mesh_text(estimate.config)
    rows = estimate.rows / estimate.target.count
    tokens = f"{rows:g} x {config.max_target_length:,} tokens a device"
    console.print(f"[bold]{config.model_name}[/bold] on {estimate.target}: {mesh}; {tokens}")
    console.print(f"parameters {estimate.parameters:,}, active {estimate.active:,}")
    sizes = [(name, format_bytes(count), origin) for name, count, origin in memory_rows(estimate)]
    console.print(build_table("Bytes a device", ("", "size", "from"), sizes))
    console.print(policy_table(estimate))
    if estimate.program is not None:
        console.print(collectives_table(estimate.program))
    console.print(verdict(estimate), markup=False)
    for line in suggestions(estimate, plans):
        console.print(line, markup=False)


def collectives_table(program: Program) -> "Table | str":
    if program.collectives is None:
        from rich.markup import escape

        return escape(f"collectives a step cannot be read: {program.collectives_error}")
    rows = [
        (collective.kind, f"{collective.count:,}", format_bytes(collective.bytes))
        for collective in program.collectives
    ]
    return build_table(
        "Collectives a step", ("kind", "count", "bytes a device"), rows or [("none", "", "")]
    )


def build_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> "Table":
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), title_style="bold"
    )
    for index, column in enumerate(columns):
        is_number = index > 0 and any(row[index][:1].isdigit() for row in rows)
        table.add_column(column, justify="right" if is_number else "left", no_wrap=index < 2)
    for row in rows:
        table.add_row(*row)
    return table


def policy_table(estimate: Estimate) -> "Table":
    rows = []
    for saved in estimate.policies:
        plan, largest = estimate.plan(saved, estimate.rows), estimate.largest_batch(saved)
        mark = " *" if saved is estimate.current else ""
        rows.append(
            (
                f"{saved.policy}{mark}",
                format_bytes(saved.layers.device),
                format_bytes(saved.outer),
                format_bytes(saved.layers.host) if saved.layers.host else "0",
                f"{saved.recompute:.0%}",
                format_bytes(plan.expected),
                f"{largest.batch_value:g}" if largest else "none",
            )
        )
    columns = (
        "remat_policy (* now)",
        "layers",
        "outer",
        "host",
        "recompute",
        "needed",
        "largest batch",
    )
    return build_table(
        "Saved activations a device, and recomputed FLOPs (of a forward pass)", columns, rows
    )


def mesh_text(config: MaxTextConfig) -> str:
    sizes = [i * d for i, d in zip(config.ici_parallelism, config.dcn_parallelism, strict=True)]
    return (
        ", ".join(f"{axis} {n}" for axis, n in zip(config.mesh_axes, sizes, strict=True) if n > 1)
        or "one device"
    )


def verdict(estimate: Estimate) -> str:
    memory = estimate.target.memory_bytes
    if estimate.refusal:
        return f"does not fit: {estimate.refusal}"
    if memory is None:
        return (
            f"needs {format_bytes(estimate.needed)} a device; the memory of "
            f"{estimate.target.kind} is not known here"
        )
    outcome = "does not fit" if not estimate.fits else "fits"
    method = "compiled" if estimate.program else "by arithmetic, not compiled"
    return (
        f"{outcome}: {format_bytes(estimate.needed)} of {format_bytes(memory)} a device "
        f"({estimate.needed / memory:.0%}; {method})"
    )


def suggestions(estimate: Estimate, plans: dict[str, Plan | None]) -> list[str]:
    lines = []
    policy, batch = plans["policy"], plans["batch"]
    if policy:
        lines.append(
            f"least recomputation at this batch: remat_policy={policy.policy} "
            f"({describe_needs(policy)})"
        )
    if batch:
        lines.append(
            f"largest batch: {batch.batch_key}={batch.batch_value:g} "
            f"remat_policy={batch.policy} ({describe_needs(batch)})"
        )
    if not lines and estimate.target.memory_bytes is not None:
        lines.append(
            "no batch and no policy fits: use more devices, shorter sequences or num_vocab_tiling"
        )
    return lines


def describe_needs(plan: Plan) -> str:
    if plan.measured is None:
        return f"{format_bytes(plan.expected)}, extrapolated"
    return f"{format_bytes(plan.measured)}, compiled; {format_bytes(plan.expected)} was expected"


def to_json(estimate: Estimate, plans: dict[str, Plan | None]) -> Json:
    """The JSON output; all sizes in bytes of one device."""
    config, target = estimate.config, estimate.target
    return {
        "model_name": config.model_name,
        "target": {
            "name": target.name,
            "kind": target.kind,
            "devices": target.count,
            "slices": target.slices,
            "memory": target.memory_bytes,
        },
        estimate.batch_key: estimate.batch_value(estimate.rows),
        "remat_policy": estimate.current.policy,
        "parameters": estimate.parameters,
        "active_parameters": estimate.active,
        "weights": estimate.weights.device,
        "optimizer": estimate.optimizer.device,
        "reference": estimate.reference.device,
        "gradients": estimate.gradients,
        "batch": estimate.batch,
        "rollout_caches": estimate.rollout_caches,
        "temporaries": estimate.temporaries,
        "host": estimate.host,
        "needed": estimate.needed,
        "fits": estimate.fits,
        "refusal": estimate.refusal or None,
        "compiled": asdict(estimate.program) if estimate.program else None,
        "activations": [
            {
                "remat_policy": saved.policy,
                "layers": saved.layers.device,
                "around": saved.outer,
                "host": saved.layers.host,
                "computed_again": round(saved.recompute, 4),
                "needed": estimate.plan(saved, estimate.rows).expected,
                f"largest_{estimate.batch_key}": (
                    largest.batch_value if (largest := estimate.largest_batch(saved)) else None
                ),
            }
            for saved in estimate.policies
        ],
        "suggestions": {name: plan and asdict(plan) for name, plan in plans.items()},
    }
