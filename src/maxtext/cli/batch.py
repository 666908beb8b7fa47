"""`maxtext batch`: the answers to a file of requests, offline and resumable.

Each line of the requests gives one line of answers, in the order in which they finish. The same
command goes on where an earlier one stopped.
"""

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxtext.cli import arguments
from maxtext.cli.answering import Answering, note, open_model, refuse, settle
from maxtext.cli.batch_files import Answers, Line, lines
from maxtext.cli.models import aligned
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.files import local_path

LINE_SECONDS = 10.0  # between two lines of progress where there is no terminal
# Beside the model, what shapes the answers. How they are computed (devices, pages …) may change
# between two runs.
SHAPING = (
    "max_target_length", "max_prefill_predict_length", "add_bos", "use_chat_template", "chat_template",
    "chat_template_path", "tokenizer_path", "decode_sampling_strategy", "decode_sampling_temperature",
    "decode_sampling_top_k", "decode_sampling_nucleus_p", "init_weights_seed", "return_log_prob", "quantization",
    "quantize_kvcache", "kv_quant_dtype", "kv_quant_axis", "dtype", "weight_dtype", "matmul_precision",
)  # fmt: skip
USELESS = {
    "prompt": "the prompts are in the file",
    "load_parameters_path": "--model names the model",
    "multi_sampling": "repeat the line, each has a seed of its own",
    "autoregressive_decode_assert": "it is about the completion of `maxtext decode`",
}


def run(args: list[str]) -> int:
    place = arguments.take_value(args, "--model")
    overwrite = arguments.take_flag(args, "--overwrite")
    if place is None or len(args) < 2 or any(arg.startswith("-") for arg in args):
        raise ConfigError(
            "name two files and a model: maxtext batch IN.jsonl OUT.jsonl --model DIR [--overwrite] [key=value ...]"
        )
    requests, out = (local_path(arg) for arg in args[:2])
    if not requests.is_file():
        raise ConfigError(f"there is no file {requests}: it should have a request on each line")
    if out.exists() and (not out.is_file() or out.samefile(requests)):
        reason = "it is no regular file" if not out.is_file() else "it is the file of requests"
        raise ConfigError(f"{out} cannot take the answers: {reason}; name another file")
    place = model_place(place)
    config = settle(place, None, args[2:])
    refuse(config, "batch", USELESS)
    from maxtext.checkpoint.open import MODEL_KEYS

    shaping = {key: getattr(config, key) for key in (*SHAPING, *sorted(MODEL_KEYS))}
    answers = Answers(out, shaping | {"model": place}, overwrite)
    before = len(answers)
    try:
        if not answers.verify(requests):
            answers.begin()
            print(f"all {before:,} requests of {requests} are answered in {out}")
            return 0
        if before:
            note(f"{before:,} requests are answered, the others follow")
        model = open_model(place, config)
        with Report(requests) as report:
            answer_all(model, requests, answers, report)
    except KeyboardInterrupt:
        command = "the same command without --overwrite" if overwrite else "the same command"
        note(f"{len(answers) - before:,} requests more are answered in {out}; {command} goes on")
        raise
    finally:
        answers.close()
    print(f"wrote {out}\n{aligned(report.rows(), left=1)}", end="")
    return 0


def model_place(named: str) -> str:
    """The same model for all answers: of a run, which may go on, the step that is the newest
    now.
    """
    from maxtext.checkpoint import steps

    folder = local_path(named)
    if not folder.is_dir():
        return named
    return str(
        (steps.steps_under(folder)[-1] if steps.is_checkpoints(folder) else folder).resolve()
    )


def answer_all(model: Answering, requests: Path, answers: Answers, report: "Report") -> None:
    from maxtext.cli.batch_requests import ask_of, parsed
    from maxtext.inference.sampling import Sampling

    sampling = Sampling.of(model.config)
    waiting: dict[int, tuple[Line, dict[str, Any]]] = {}  # by the number of the ask
    number = itertools.count()
    answers.begin()

    def finish(line: Line, record: dict[str, Any], result: dict[str, Any], tokens: int) -> None:
        answers.write(line, ({"id": record["id"]} if "id" in record else {}) | result)
        report(line, tokens, failed="error" in result)

    def asks() -> Iterator[Any]:
        for line in lines(requests):
            if answers.has(line):
                report.skip(line)
                continue
            record: dict[str, Any] = {}
            try:
                record = parsed(line.data)
                ask = ask_of(record, line.index, model, sampling)
            except UserError as error:
                finish(line, record, {"finished": "error", "error": str(error)}, 0)
                continue
            waiting[next(number)] = line, record
            yield ask

    for answer in model.llm.answers(asks()):
        line, record = waiting.pop(answer.index)
        finish(
            line, record, result_of(answer, record, model.config.return_log_prob), len(answer.ids)
        )
    if waiting:
        raise UserError(
            f"{len(waiting)} requests were left without an answer: run the same command again"
        )


def result_of(answer: Any, record: dict[str, Any], log_probs: bool) -> dict[str, Any]:
    """Text for text, ids for ids."""
    if answer.error:
        return {"finished": "error", "error": answer.error}
    result: dict[str, Any] = {} if isinstance(record.get("prompt"), list) else {"text": answer.text}
    if log_probs:
        result["log_probs"] = [round(float(value), 6) for value in answer.log_probs]
    if log_probs or "text" not in result:
        result["ids"] = list(answer.ids)
    return result | {"finished": answer.finished}


class Report:
    """Progress, by bytes of the requests, since nobody has counted them: a bar on a terminal,
    elsewhere a line now and then."""

    def __init__(self, requests: Path):
        self.total = requests.stat().st_size
        self.done = self.answered = self.failed = self.tokens = 0  # `done`: bytes
        self.began = self.said = time.monotonic()
        self.bar: Any = None

    def __enter__(self) -> "Report":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                Progress,
                TaskProgressColumn,
                TextColumn,
                TimeRemainingColumn,
            )

            columns = (
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, console=Console(stderr=True))
            self.task = self.bar.add_task("", total=self.total)
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar:
            self.bar.stop()

    def skip(self, line: Line) -> None:
        """A line that an earlier run has answered."""
        self.done += len(line.data)

    def __call__(self, line: Line, tokens: int, failed: bool) -> None:
        self.done += len(line.data)
        self.tokens += tokens
        self.answered += 1
        self.failed += failed
        now = time.monotonic()
        if not self.bar and now - self.said < LINE_SECONDS:
            return
        self.said = now
        rate = (
            f"{self.answered:,} requests, {self.tokens / max(now - self.began, 1e-9):,.0f} tokens/s"
        )
        if self.bar:
            self.bar.update(self.task, completed=self.done, description=rate)
        else:
            print(f"{self.done / self.total:.0%}: {rate}", file=sys.stderr, flush=True)

    def rows(self) -> list[tuple[str, str]]:
        seconds = max(time.monotonic() - self.began, 1e-9)
        return [
            ("requests", f"{self.answered:,}"),
            ("with errors", f"{self.failed:,}"),
            ("tokens", f"{self.tokens:,}"),
            ("tokens/s", f"{self.tokens / seconds:,.1f}"),
        ]
