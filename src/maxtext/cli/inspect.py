"""`maxtext inspect`: shows the contents of a checkpoint and verifies its files."""

import json

from maxtext.adapters import peft
from maxtext.checkpoint import steps
from maxtext.checkpoint.inspect import CheckpointSummary, TensorRow, summarize
from maxtext.cli.arguments import Arguments
from maxtext.cli.terminal import format_table
from maxtext.common.errors import UserError
from maxtext.common.hub import find_folder
from maxtext.common.types import Json


def run(arguments: Arguments) -> int:
    folder, as_json = find_folder(arguments.args[0]).absolute(), arguments["--json"]
    if peft.is_adapter_folder(folder) and not steps.has_steps(folder):
        summary = peft.summarize(folder)
    else:
        summary = summarize(folder, arguments["--verify"])
    print(json.dumps(plain(summary)) if as_json else text(summary), end="\n" if as_json else "")
    if summary.damaged:
        raise UserError("\n".join(summary.damaged))
    return 0


def text(summary: CheckpointSummary) -> str:
    lines = [f"{summary.path}: {summary.kind}"]
    lines += [
        f"  {name}: {describe(value)}"
        for name, value in summary.about.items()
        if value not in ({}, None)
    ]
    steps = [
        ("step", "size", "state"),
        *((step.path.name, size(step.size), step.state) for step in summary.steps),
    ]
    table = format_table([(name, state, count) for name, count, state in steps], left=2)
    parts = ["\n".join(lines) + "\n", table]
    if summary.rows:
        complete = [step for step in summary.steps if step.state != "incomplete"]
        columns = 5 if any(row.sharding for row in summary.rows) else 4
        rows = [("name", "shape", "dtype", "size", "sharding"), *map(cells, summary.rows)]
        total = sum(row.tensor.nbytes for row in summary.rows)
        parts.append(
            f"tensors of {complete[-1].path.name}\n"
            + format_table([row[:columns] for row in rows], left=3)
        )
        parts.append(f"{len(summary.rows):,} tensors, {size(total)}\n")
    return "\n".join(parts)


def cells(row: TensorRow) -> tuple[str, ...]:
    shape = " x ".join(map(str, row.tensor.shape)) or "scalar"
    return row.name, shape, row.tensor.dtype.name, size(row.tensor.nbytes), row.sharding


def describe(value: object) -> str:
    return (
        ", ".join(f"{key} {item}" for key, item in value.items())
        if isinstance(value, dict)
        else str(value)
    )


def size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def plain(summary: CheckpointSummary) -> Json:
    """The summary as JSON data."""
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
