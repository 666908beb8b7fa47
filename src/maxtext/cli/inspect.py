"""`maxtext inspect`: what a checkpoint holds, and whether its files are as they were written."""

import json
from typing import Any

from maxtext.checkpoint.inspect import CheckpointSummary, TensorRow, summarize
from maxtext.cli import arguments
from maxtext.cli.models import aligned
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.files import local_path


def run(args: list[str]) -> int:
    thorough = arguments.take_flag(args, "--verify")
    as_json = arguments.take_flag(args, "--json")
    if len(args) != 1 or args[0].startswith("-"):
        raise ConfigError("give one folder: maxtext inspect DIR [--verify] [--json]")
    summary = summarize(local_path(args[0]).absolute(), thorough)
    print(json.dumps(plain(summary)) if as_json else text(summary), end="\n" if as_json else "")
    if summary.damaged:
        raise UserError("\n".join(summary.damaged))
    return 0


def text(summary: CheckpointSummary) -> str:
    lines = [f"{summary.path}: {summary.kind}"]
    lines += [
        f"  {name}: {words_of(value)}"
        for name, value in summary.about.items()
        if value not in ({}, None)
    ]
    steps = [
        ("step", "size", "state"),
        *((step.path.name, size(step.size), step.state) for step in summary.steps),
    ]
    table = aligned([(name, state, count) for name, count, state in steps], left=2)
    parts = ["\n".join(lines) + "\n", table]
    if summary.rows:
        whole = [step for step in summary.steps if step.state != "incomplete"]
        columns = 5 if any(row.sharding for row in summary.rows) else 4
        rows = [("name", "shape", "dtype", "size", "sharding"), *map(cells, summary.rows)]
        total = sum(row.tensor.nbytes for row in summary.rows)
        parts.append(
            f"tensors of {whole[-1].path.name}\n" + aligned([row[:columns] for row in rows], left=3)
        )
        parts.append(f"{len(summary.rows):,} tensors, {size(total)}\n")
    return "\n".join(parts)


def cells(row: TensorRow) -> tuple[str, ...]:
    shape = " x ".join(map(str, row.tensor.shape)) or "one number"
    return row.name, shape, row.tensor.dtype.name, size(row.tensor.nbytes), row.sharding


def words_of(value: Any) -> str:
    return (
        ", ".join(f"{key} {arg}" for key, arg in value.items())
        if isinstance(value, dict)
        else str(value)
    )


def size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def plain(summary: CheckpointSummary) -> dict[str, Any]:
    """For another program."""
    return {
        "path": str(summary.path),
        "kind": summary.kind,
        "about": dict(summary.about),
        "steps": [
            {
                "name": step.path.name,
                "bytes": step.size,
                "state": step.state,
                "problems": list(step.problems),
            }
            for step in summary.steps
        ],
        "tensors": [
            {
                "name": row.name,
                "shape": list(row.tensor.shape),
                "dtype": row.tensor.dtype.name,
                "bytes": row.tensor.nbytes,
                "sharding": row.sharding,
            }
            for row in summary.rows
        ],
    }
