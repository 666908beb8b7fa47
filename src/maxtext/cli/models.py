"""`maxtext models`: what the named models are, counted from their descriptions; no weight is
made.
"""

from collections.abc import Sequence
from typing import Any

from maxtext.common.errors import ConfigError
from maxtext.configs import fields, load
from maxtext.configs.derive import Devices
from maxtext.configs.ledger import unsupported_by_model
from maxtext.configs.load import base_values
from maxtext.models import make_template
from maxtext.models.counts import active_count, breakdown, parameter_count
from maxtext.models.registry import layers

COLUMNS = ("name", "family", "layers", "width", "vocabulary", "parameters", "active", "runs")
NOTE = "active: of the experts those that a token meets, and all other weights (embedding and output head, too)."

RUNS = "runs: no where the model needs keys that do not act yet; `maxtext models NAME` says which."


def run(args: list[str]) -> int:
    if len(args) > 1 or any(arg.startswith("-") or "=" in arg for arg in args):
        raise ConfigError(
            f"maxtext models takes the name of one model or nothing, not {' '.join(args)!r}"
        )
    print(description(args[0]) if args else table(), end="")
    return 0


def table() -> str:
    """All named models, a line each."""
    rows = [COLUMNS, *(row(name) for name in fields.choices("model_name"))]
    return aligned(rows, left=2) + f"\n{NOTE}\n{RUNS}\n"


def row(name: str) -> tuple[str, ...]:
    config, weights = model(name)
    sizes = (len(layers(config)), config.emb_dim, config.vocab_size)
    counts = (parameter_count(weights), active_count(config, weights))
    runs = "no" if unsupported_by_model(config, base_values()) else "yes"
    return name, config.decoder_block.value, *(f"{number:,}" for number in (*sizes, *counts)), runs


def description(name: str) -> str:
    """One model, part by part."""
    config, weights = model(name)
    total = parameter_count(weights)
    counts = breakdown(weights) | {"parameters": total, "active": active_count(config, weights)}
    rows = [(part, f"{count:,}", f"{count / total:.1%}") for part, count in counts.items()]
    title = f"{name}: {config.decoder_block.value}, {len(layers(config))} layers of width {config.emb_dim:,}"
    needs = "".join(
        f"cannot run: {problem.message}\n"
        for problem in unsupported_by_model(config, base_values())
    )
    return f"{title}, vocabulary {config.vocab_size:,}\n\n{aligned(rows, left=1)}\n{NOTE}\n{needs}"


def model(name: str) -> tuple[Any, Any]:
    """The configuration as the model's file has it, and its weights without values."""
    # Scanned layers are described once for all repeats.
    overrides = [f"model_name={name}", "scan_layers=true", "override_model_config=true"]
    config = load(None, overrides, environ={}, devices=Devices(1))
    return config, make_template(config).weights


def aligned(rows: Sequence[Sequence[str]], left: int) -> str:
    """Columns as wide as their widest entry, the first ones flush left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for cells in rows:
        sides = ["<"] * left + [">"] * (len(cells) - left)
        padded = [
            f"{cell:{side}{width}}" for cell, side, width in zip(cells, sides, widths, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines) + "\n"
