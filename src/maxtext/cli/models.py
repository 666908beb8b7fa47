"""`maxtext models`: lists the named models and their parameter counts, computed from shapes."""

from typing import Any

from maxtext.cli.arguments import Arguments
from maxtext.cli.terminal import format_table
from maxtext.configs import fields
from maxtext.configs.derive import Devices
from maxtext.configs.ledger import unsupported_by_model
from maxtext.configs.load import base_values
from maxtext.models.configuration import load
from maxtext.models.counts import active_count, breakdown, parameter_count
from maxtext.models.registry import layers
from maxtext.models.transformer import make_template

COLUMNS = ("name", "family", "layers", "width", "vocabulary", "parameters", "active", "runs")
NOTE = (
    "active: parameters used per token: its experts, and all other weights with embedding and "
    "output head."
)
RUNS = "runs: no if the model needs keys that do not act yet; `maxtext models NAME` lists them."


def run(arguments: Arguments) -> int:
    print(description(arguments.args[0]) if arguments.args else table(), end="")
    return 0


def table() -> str:
    """One line per named model."""
    rows = [COLUMNS, *(row(name) for name in fields.choices("model_name"))]
    return format_table(rows, left=2) + f"\n{NOTE}\n{RUNS}\n"


def row(name: str) -> tuple[str, ...]:
    config, weights = abstract_model(name)
    sizes = (len(layers(config)), config.emb_dim, config.vocab_size)
    counts = (parameter_count(weights), active_count(config, weights))
    runs = "no" if unsupported_by_model(config, base_values()) else "yes"
    return name, config.decoder_block.value, *(f"{number:,}" for number in (*sizes, *counts)), runs


def description(name: str) -> str:
    """The parameter counts of one model, by part."""
    config, weights = abstract_model(name)
    total = parameter_count(weights)
    counts = breakdown(weights) | {"parameters": total, "active": active_count(config, weights)}
    rows = [(part, f"{count:,}", f"{count / total:.1%}") for part, count in counts.items()]
    title = (
        f"{name}: {config.decoder_block.value}, {len(layers(config))} layers, "
        f"emb_dim {config.emb_dim:,}"
    )
    problems = "".join(
        f"cannot run: {problem.message}\n"
        for problem in unsupported_by_model(config, base_values())
    )
    table = format_table(rows, left=1)
    return f"{title}, vocabulary {config.vocab_size:,}\n\n{table}\n{NOTE}\n{problems}"


def abstract_model(name: str) -> tuple[Any, Any]:
    """The configuration of a named model and its abstract weights."""
    # Scanned layers have one description for all repeats.
    overrides = [f"model_name={name}", "scan_layers=true", "override_model_config=true"]
    config = load(None, overrides, environ={}, devices=Devices(1))
    return config, make_template(config).weights
