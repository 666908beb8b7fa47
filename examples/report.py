"""Results of the examples: files, a table, and plots."""

import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

METHODS = {"sft": "full SFT", "lora": "LoRA", "qlora": "QLoRA"}
BEFORE, AFTER = "#b8bec6", "#1e60b4"
COLORS = {"sft": "#1e60b4", "lora": "#e26a1c", "qlora": "#2b8a5b"}


class Stopwatch:
    """Seconds of a `with` block, and CPU seconds of this process and its finished children."""

    def __enter__(self) -> "Stopwatch":
        self.start = time.perf_counter(), cpu_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self.start[0]
        self.cpu_seconds = cpu_seconds() - self.start[1]


def cpu_seconds() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def read_losses(metrics_file: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in metrics_file.read_text().splitlines()]


def save_result(
    folder: Path,
    method: str,
    before: float,
    after: float,
    stopwatch: Stopwatch,
    losses: list[float],
) -> None:
    """Write the result of a method; print and draw those of all methods so far."""
    seconds = {"seconds": stopwatch.seconds, "cpu_seconds": stopwatch.cpu_seconds}
    result = {"before": before, "after": after, "losses": losses, **seconds}
    write_result(folder, method, result)
    results = {name: read_result(folder, name) for name in METHODS if has_result(folder, name)}
    print(f"\n{'exact match':12}{'before':>8}{'after':>8}{'seconds':>9}{'CPU seconds':>13}")
    for name, row in results.items():
        print(
            f"{METHODS[name]:12}{row['before']:8.1%}{row['after']:8.1%}{row['seconds']:9.0f}"
            f"{row['cpu_seconds']:13.0f}"
        )
    draw_fine_tuning(results).savefig(folder / "fine_tuning.png")
    print(f"\nplot: {folder / 'fine_tuning.png'}")


def save_preferences(
    folder: Path, before: dict[str, Any], after: dict[str, Any], stopwatch: Stopwatch
) -> None:
    """Write, print and draw what a preference run changed."""
    seconds = {"seconds": stopwatch.seconds, "cpu_seconds": stopwatch.cpu_seconds}
    result = {"before": before, "after": after, **seconds}
    write_result(folder, "dpo", result)
    print(f"\n{'sampled replies':18}{'before':>8}{'after':>8}")
    for label, name in (("in capitals", "preferred"), ("correct", "correct")):
        print(f"{label:18}{before[name]:8.1%}{after[name]:8.1%}")
    print(f"DPO took {stopwatch.seconds:.0f} s, {stopwatch.cpu_seconds:.0f} CPU seconds")
    draw_preferences(result).savefig(folder / "preferences.png")
    print(f"\nplot: {folder / 'preferences.png'}")


def save_seeds(
    folder: Path,
    name: str,
    runs: list[dict[str, Any]],
    stopwatch: Stopwatch,
    title: str,
    plot: str,
) -> None:
    """Write, print and draw what runs of reinforcement learning changed. `title`: of the share that
    is measured before and after each run."""
    seconds = {"seconds": stopwatch.seconds, "cpu_seconds": stopwatch.cpu_seconds}
    write_result(folder, name, {"runs": runs, **seconds})
    print(f"\n{title}\n{'':12}{'seed':>5}{'before':>8}{'after':>8}")
    for run in runs:
        print(f"{run['name']:12}{run['seed']:5}{run['before']:8.1%}{run['after']:8.1%}")
    print(f"all took {stopwatch.seconds:.0f} s, {stopwatch.cpu_seconds:.0f} CPU seconds")
    draw_seeds(runs, title).savefig(folder / plot)
    print(f"\nplot: {folder / plot}")


def write_result(folder: Path, name: str, result: dict[str, Any]) -> None:
    path = folder / name / "result.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result))


def read_result(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name / "result.json").read_text())


def has_result(folder: Path, name: str) -> bool:
    return (folder / name / "result.json").is_file()


def draw_fine_tuning(results: dict[str, dict[str, Any]]) -> Figure:
    """Losses of the steps, and exact match before and after."""
    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for index, (name, result) in enumerate(results.items()):
        left.plot(result["losses"], color=COLORS[name], linewidth=1.4, label=METHODS[name])
        draw_share(right, index - 0.2, result["before"], BEFORE, "" if index else "before")
        draw_share(right, index + 0.2, result["after"], AFTER, "" if index else "after")
    left.set(xlabel="step", ylabel="loss (nats per token)", yscale="log")
    left.set_title("Training", loc="left")
    right.set_xticks(range(len(results)), [METHODS[name] for name in results])
    right.set(ylim=(0, 1.25), yticks=(0, 0.5, 1), yticklabels=("0%", "50%", "100%"))
    right.set_title("Exact match on held-out words", loc="left")
    for axes in (left, right):
        axes.legend(frameon=False, ncols=2 if axes is right else 1, loc="upper right")
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_share(axes: Any, x: float, share: float, color: str, label: str) -> None:
    """A bar with its percentage."""
    bars = axes.bar(x, share, width=0.38, color=color, label=label or None)
    axes.bar_label(bars, [f"{100 * share:.3g}%"], padding=2)


def draw_preferences(result: dict[str, Any]) -> Figure:
    """Margins of held-out pairs before and after, and the share of sampled replies by style."""
    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    bins = np.histogram_bin_edges(result["before"]["margins"] + result["after"]["margins"], 40)
    for index, (when, color) in enumerate((("before", BEFORE), ("after", AFTER))):
        left.hist(result[when]["margins"], bins=bins, color=color, alpha=0.8, label=when)
        shares = (result[when]["preferred"], result[when]["correct"])
        for position, share in enumerate(shares):
            label = "" if position else when
            draw_share(right, position + 0.4 * index - 0.2, share, color, label)
    left.axvline(0, color="black", linewidth=0.8)
    left.set(xlabel="log p(capitals) − log p(small letters)", ylabel="held-out words")
    left.set_title("Preference margin", loc="left")
    right.set_xticks((0, 1), ("in capitals", "correct"))
    right.set(ylim=(0, 1.25), yticks=(0, 0.5, 1), yticklabels=("0%", "50%", "100%"))
    right.set_title("Sampled replies", loc="left")
    for axes in (left, right):
        axes.legend(frameon=False, ncols=2 if axes is right else 1, loc="upper right")
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_seeds(runs: list[dict[str, Any]], title: str) -> Figure:
    """The mean reward of each step, and a share before the runs, in the mean, and after each."""
    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    names = list(dict.fromkeys(run["name"] for run in runs))
    colors = dict(zip(names, (AFTER, "#e26a1c"), strict=False))
    for run in runs:
        label = run["name"] if run["seed"] == runs[0]["seed"] else None
        left.plot(run["rewards"], color=colors[run["name"]], linewidth=1.2, label=label)
    draw_share(right, 0, float(np.mean([run["before"] for run in runs])), BEFORE, "")
    for index, run in enumerate(runs):
        draw_share(right, index + 1, run["after"], colors[run["name"]], "")
    labels = ["before", *(f"{run['name']}\nseed {run['seed']}" for run in runs)]
    right.set_xticks(range(len(labels)), labels, fontsize=8)
    right.set(ylim=(0, 1.15), yticks=(0, 0.5, 1), yticklabels=("0%", "50%", "100%"))
    left.set(xlabel="step", ylabel="mean reward of sampled replies", ylim=(0, 1.05))
    left.set_title("Training", loc="left")
    right.set_title(title, loc="left")
    left.legend(frameon=False, loc="lower right")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure
