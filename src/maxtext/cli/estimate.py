"""`maxtext estimate`: will a training step fit on a target, and what would fit better; nothing runs
on a device.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from maxtext.cli import arguments
from maxtext.cli.targets import load_for_target
from maxtext.common.errors import ConfigError
from maxtext.common.hardware import format_bytes
from maxtext.configs.types import MaxTextConfig
from maxtext.trainers.estimate import Estimate, Plan, Program, estimate, plans, shortage

WIDTH = 110  # of tables that no terminal bounds
TOO_SMALL = 2  # exit code


def run(args: list[str]) -> int:
    style = arguments.take_option(args, "--format", ("json",))
    compiling = not arguments.take_flag(args, "--no-compile")
    searching = arguments.take_flag(args, "--search")
    name = arguments.take_value(args, "--target") or ""
    slices = arguments.take_value(args, "--slices") or "0"
    if not slices.isdigit():
        raise ConfigError(f"--slices takes a number, not {slices!r}")
    if searching and not compiling:
        raise ConfigError(
            "--search compiles to confirm, and --no-compile forbids it: leave one out"
        )
    path, overrides = arguments.split(args)
    config, target = load_for_target(path, overrides, name, int(slices))
    found = estimate(config, target, compiling)
    suggested = plans(found, searching)
    if style == "json":
        print(json.dumps(as_data(found, suggested), indent=2))
    else:
        show(found, suggested)
    if found.fits is False:
        print(
            f"maxtext: error: {config.model_name} does not fit on {target}: {shortage(found)}",
            file=sys.stderr,
        )
        return TOO_SMALL
    return 0


def parts(found: Estimate) -> list[tuple[str, int, str]]:
    """Of one device: (name, bytes, where the number comes from)."""
    program = found.program
    lines = [
        ("weights", found.weights.device, "shapes and shards"),
        ("optimizer", found.optimizer.device, "shapes and shards"),
        ("gradients", found.gradients, "shapes and shards; part of the temporaries"),
        ("batch", found.batch, "shapes and shards"),
        (
            "activations kept",
            found.current.device,
            f"traced, {found.current.policy}; part of the temporaries",
        ),
    ]
    if program is None:
        lines.append(
            ("at work", found.working, "one layer's activations and gathered weights; a guess")
        )
        lines.append(("temporaries", found.temporaries, "gradients, activations kept, at work"))
    else:
        lines.append(("temporaries", program.temporaries, "compiled program"))
        lines.append(
            (
                "arguments",
                program.arguments,
                "compiled program: weights, optimizer, used parts of the batch",
            )
        )
        lines.append(
            (
                "outputs",
                program.outputs,
                f"compiled program; {format_bytes(program.aliased)} in place of arguments",
            )
        )
        if program.peak:
            used = program.peak - program.arguments
            lines.append(
                (
                    "temporaries used",
                    used,
                    "compiled program: at one time, of those that it reserves",
                )
            )
    if found.host:
        lines.append(("host memory", found.host, "what is offloaded, for one device"))
    lines.append(("needed", found.needed, "arguments + outputs - in place + temporaries"))
    return lines


def show(found: Estimate, suggested: dict[str, Plan | None]) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    config, mesh = found.config, mesh_text(found.config)
    tokens = f"{config.per_device_batch_size:g} x {config.max_target_length:,} tokens a device"
    console.print(f"[bold]{config.model_name}[/bold] on {found.target}: {mesh}; {tokens}")
    console.print(f"parameters {found.parameters:,}, active {found.active:,}")
    console.print(
        rows_table(
            "Bytes a device",
            ("", "size", "from"),
            [(a, format_bytes(b), c) for a, b, c in parts(found)],
        )
    )
    console.print(policy_table(found))
    if found.program is not None:
        console.print(collectives_table(found.program))
    console.print(verdict(found), markup=False)
    for line in suggestions(found, suggested):
        console.print(line, markup=False)


def collectives_table(program: Program) -> Any:
    if program.collectives is None:
        from rich.markup import escape

        return escape(f"collectives a step cannot be read: {program.collectives_error}")
    rows = [(one.kind, f"{one.count:,}", format_bytes(one.bytes)) for one in program.collectives]
    return rows_table(
        "Collectives a step", ("kind", "count", "bytes a device"), rows or [("none", "", "")]
    )


def rows_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), title_style="bold"
    )
    for place, column in enumerate(columns):
        right = place > 0 and any(row[place][:1].isdigit() for row in rows)
        table.add_column(column, justify="right" if right else "left", no_wrap=place < 2)
    for row in rows:
        table.add_row(*row)
    return table


def policy_table(found: Estimate) -> Any:
    rows = []
    for kept in found.policies:
        plan, largest = found.plan(kept, found.rows), found.largest(kept)
        mark = " *" if kept is found.current else ""
        rows.append(
            (
                f"{kept.policy}{mark}",
                format_bytes(kept.layers.device),
                format_bytes(kept.around),
                format_bytes(kept.layers.host) if kept.layers.host else "0",
                f"{kept.again:.0%}",
                format_bytes(plan.expected),
                f"{largest.per_device:g}" if largest else "none",
            )
        )
    columns = (
        "remat_policy (* now)",
        "layers",
        "around",
        "host",
        "again",
        "needed",
        "largest batch",
    )
    return rows_table(
        "Activations kept a device, and products computed again (of a forward pass)", columns, rows
    )


def mesh_text(config: MaxTextConfig) -> str:
    sizes = [i * d for i, d in zip(config.ici_parallelism, config.dcn_parallelism, strict=True)]
    return (
        ", ".join(f"{axis} {n}" for axis, n in zip(config.mesh_axes, sizes, strict=True) if n > 1)
        or "one device"
    )


def verdict(found: Estimate) -> str:
    memory = found.target.memory_bytes
    if found.refusal:
        return f"does not fit: {found.refusal}"
    if memory is None:
        return f"needs {format_bytes(found.needed)} a device; the memory of {found.target.kind} is not known here"
    how = "does not fit" if not found.fits else "fits"
    by = "compiled" if found.program else "by arithmetic, not compiled"
    return f"{how}: {format_bytes(found.needed)} of {format_bytes(memory)} a device ({found.needed / memory:.0%}; {by})"


def suggestions(found: Estimate, suggested: dict[str, Plan | None]) -> list[str]:
    lines = []
    policy, batch = suggested["policy"], suggested["batch"]
    if policy:
        lines.append(
            f"least recomputation at this batch: remat_policy={policy.policy} ({needs(policy)})"
        )
    if batch:
        lines.append(
            f"largest batch: per_device_batch_size={batch.per_device:g} remat_policy={batch.policy} ({needs(batch)})"
        )
    if not lines and found.target.memory_bytes is not None:
        lines.append(
            "no batch and no policy fits: use more devices, shorter sequences or num_vocab_tiling"
        )
    return lines


def needs(plan: Plan) -> str:
    if plan.measured is None:
        return f"{format_bytes(plan.expected)}, extrapolated"
    return f"{format_bytes(plan.measured)}, compiled; {format_bytes(plan.expected)} was expected"


def as_data(found: Estimate, suggested: dict[str, Plan | None]) -> dict[str, Any]:
    """For another program; all sizes in bytes of one device."""
    config, target = found.config, found.target
    return {
        "model_name": config.model_name,
        "target": {
            "name": target.name,
            "kind": target.kind,
            "devices": target.count,
            "slices": target.slices,
            "memory": target.memory_bytes,
        },
        "per_device_batch_size": config.per_device_batch_size,
        "remat_policy": found.current.policy,
        "parameters": found.parameters,
        "active_parameters": found.active,
        "weights": found.weights.device,
        "optimizer": found.optimizer.device,
        "gradients": found.gradients,
        "batch": found.batch,
        "temporaries": found.temporaries,
        "host": found.host,
        "needed": found.needed,
        "fits": found.fits,
        "refusal": found.refusal or None,
        "compiled": asdict(found.program) if found.program else None,
        "activations": [
            {
                "remat_policy": kept.policy,
                "layers": kept.layers.device,
                "around": kept.around,
                "host": kept.layers.host,
                "computed_again": round(kept.again, 4),
                "needed": found.plan(kept, found.rows).expected,
                "largest_per_device_batch_size": (
                    largest.per_device if (largest := found.largest(kept)) else None
                ),
            }
            for kept in found.policies
        ],
        "suggestions": {name: plan and asdict(plan) for name, plan in suggested.items()},
    }
