"""Tasks of lm-eval, run in this process, and the JSON report of an evaluation.

`load_tasks` and `run_tasks` import lm-eval, of the extra `eval`. `build_report` returns versions,
settings and scores.
"""

import contextlib
import difflib
import json
import logging
import math
import os
import platform
import random
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata

import jax
import numpy as np
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from maxtext.common import files
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.files import local_path
from maxtext.common.types import Json
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.evaluation.lm_eval_model import MaxTextLM

# lm-eval's own seeds: of `random`, and of NumPy and the choice of few-shot examples
RANDOM_SEED, OTHER_SEED = 0, 1234
BOOTSTRAP_ITERS = 1000  # for standard errors that have no closed form
REPORTED = ("results", "groups", "configs", "versions", "n-shot", "n-samples", "higher_is_better")


def load_tasks(names: Sequence[str], include_path: str | None, num_fewshot: int | None) -> Json:
    """lm-eval's tasks and groups with their data, for `run_tasks`. Raises ConfigError if a name is
    unknown, UserError if a task cannot be loaded.
    """
    if include_path is not None and not local_path(include_path).is_dir():
        raise ConfigError(f"--include-path {include_path} is not a folder")
    with quiet():
        manager, matches = find_tasks(names, include_path)
        try:
            loaded = manager.load(matches)
        except Exception as error:  # of YAML, datasets, networks: no common base class
            raise UserError(
                f"the tasks {', '.join(names)} cannot be loaded ({type(error).__name__}: "
                f"{first_line(error)}): check their YAML files, and that their data is on this "
                "machine or can be downloaded"
            ) from error
    for task in loaded["tasks"].values():
        default = task.get_config("num_fewshot")
        if default is None or (num_fewshot is not None and default != 0):
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        task.set_fewshot_seed(seed=OTHER_SEED)
    return loaded


def find_tasks(names: Sequence[str], include_path: str | None) -> tuple[TaskManager, list[str]]:
    """The tasks that the names match. lm-eval's own, some thousands of YAML files, are read only if
    the folder does not have them all.
    """
    folder = None if include_path is None else str(local_path(include_path))
    for include_defaults in (False, True):
        if folder is None and not include_defaults:
            continue
        manager = TaskManager(include_path=folder, include_defaults=include_defaults)
        unknown = [name for name in names if not manager.match_tasks([name])]
        if not unknown:
            return manager, manager.match_tasks(list(names))
    near = difflib.get_close_matches(unknown[0], manager.all_tasks, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "`lm-eval ls tasks` lists them"
    raise ConfigError(f"there is no task {unknown[0]!r}; {hint}")


def run_tasks(model: MaxTextLM, loaded: Json, limit: int | None, apply_chat_template: bool) -> Json:
    """The scores of loaded tasks and groups with their standard errors, in lm-eval's form."""
    random.seed(RANDOM_SEED)
    np.random.seed(OTHER_SEED)
    with quiet():
        try:
            results = evaluate(
                lm=model,
                task_dict=loaded,
                limit=limit,
                bootstrap_iters=BOOTSTRAP_ITERS,
                log_samples=False,
                apply_chat_template=apply_chat_template,
                fewshot_as_multiturn=apply_chat_template,
            )
        except (ValueError, ImportError) as error:  # unsafe code, images, packages of a task
            raise UserError(first_line(error)) from error
    assert results is not None, "this process has rank 0"
    return {key: results[key] for key in REPORTED if key in results}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Standard output belongs to the command. Processes for bootstrapping would be forks, which do
    not go with JAX.
    """
    variable = "DISABLE_MULTIPROC"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logger.setLevel(level)
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""


def score_rows(results: Json) -> list[tuple[str, ...]]:
    """A table: the scores of each task and group."""
    rows: list[tuple[str, ...]] = [("task", "metric", "score", "stderr", "samples")]
    for task, metrics in {**results["results"], **results.get("groups", {})}.items():
        samples = results.get("n-samples", {}).get(task, {}).get("effective", "")
        for key, value in metrics.items():
            metric, separator, filter_name = key.partition(",")
            if not separator or metric.endswith("_stderr"):
                continue
            stderr = metrics.get(f"{metric}_stderr,{filter_name}")
            name = metric if filter_name == "none" else f"{metric} ({filter_name})"
            rows.append((task, name, format_score(value), format_score(stderr), str(samples)))
    return rows


def format_score(value: object) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:.4f}" if is_number else ""


PACKAGES = ("maxtext", "jax", "tokenizers", "lm-eval", "llguidance")
# The keys that decide the scores of a model, besides those that describe it.
SETTINGS = (
    "max_target_length",
    "dtype",
    "weight_dtype",
    "matmul_precision",
    "quantization",
    "quantize_kvcache",
    "attention",
    "tokenizer_path",
    "chat_template_path",
    "lora_input_adapters_path",
    "init_weights_seed",
)


def environment() -> dict[str, str]:
    """Versions of packages that are installed, and the devices."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    return versions | {"devices": devices}


def model_settings(path: str, config: MaxTextConfig) -> Json:
    """The model and the keys that decide its scores."""
    values = {key: getattr(config, key) for key in SETTINGS}
    return {"model": path} | {key: getattr(value, "value", value) for key, value in values.items()}


def build_report(path: str, config: MaxTextConfig, scores: Json, options: Json) -> Json:
    """The scores of the model at `path`, with the environment, settings and options."""
    settings = model_settings(path, config) | options
    return {**scores, "environment": environment(), "settings": settings}


def write_report(path: str | os.PathLike, report: Json) -> None:
    """Write a report as JSON, in which a number that is not finite is null."""
    text = json.dumps(to_json(report), indent=1, ensure_ascii=False, default=str)
    files.write_text(path, text + "\n")


def to_json(value: object) -> object:
    """Dicts, lists, texts, finite numbers and None; functions by their names."""
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if hasattr(value, "item"):  # a NumPy scalar
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.__name__ if callable(value) and hasattr(value, "__name__") else value
