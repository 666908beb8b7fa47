"""`maxtext batch`: offline, resumable completion of a file of requests.

Each line of the requests gives one line of results, in the order in which they finish. The same
command resumes where an earlier run stopped.
An error in a line concerns that line only.
"""

import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import PlainValidator

from maxtext.cli import positionals
from maxtext.cli.arguments import Arguments
from maxtext.cli.batch_files import Line, ResultFile, read_lines
from maxtext.cli.generation import (
    GenerationSession,
    load_session,
    model_path,
    note,
    refuse_useless,
    resolve_model,
)
from maxtext.cli.terminal import LOG_SECONDS, format_table
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.files import local_path
from maxtext.common.hub import find_folder
from maxtext.common.types import Json
from maxtext.configs.load import base_values
from maxtext.configs.sources import suggest
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling.params import SamplingParams
from maxtext.inference.sampling.structured_outputs import parse_response_format
from maxtext.inference.server.fields import SamplingFields, given_sampling
from maxtext.inference.server.messages import Message, parse_messages
from maxtext.inference.server.protocol import validate
from maxtext.inference.strict_json import JsonReader

# Results carry the id, so all of a line can be written as JSON again: Python's writer has limits.
READER = JsonReader(
    "the line",
    encoding="utf-8-sig",
    allows_half_pairs=True,
    has_unique_keys=True,
    max_depth=100,
    max_digits=1000,
)


def parse_line(data: bytes) -> Json:
    record = READER.read(data)
    if not isinstance(record, dict):
        raise UserError('the line is not a JSON object such as {"prompt": "I love to"}')
    return record


def check_prompt(prompt: Any) -> str | list[int]:
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not isinstance(prompt, str) and not is_ids:
        raise UserError("prompt must be text or a list of token ids")
    return prompt


def check_adapter(adapter: Any) -> str | None:
    if not isinstance(adapter, str | None):
        raise UserError(f"adapter={adapter!r} must be the name of an adapter, or empty for none")
    return adapter


class BatchLine(SamplingFields):
    """A line. null is a value, which only `id` and `adapter` may have."""

    prompt: Annotated[str | list[int], PlainValidator(check_prompt)] = ""
    messages: Annotated[list[Message], PlainValidator(parse_messages)] = []
    id: Any = None
    max_new_tokens: int = 0
    n: Any = None
    response_format: Any = None
    adapter: Annotated[str | None, PlainValidator(check_adapter)] = None

    @classmethod
    def from_record(cls, record: Json) -> "BatchLine":
        """Raises UserError for the first field that is unknown or wrong."""
        for name in record:
            if name not in cls.model_fields:
                hint = suggest(name, tuple(cls.model_fields)) or "; put data of your own into id"
                raise UserError(f"unknown field {name!r}{hint}")
        if ("prompt" in record) == ("messages" in record):
            raise UserError("a line has either a prompt or messages")
        if "response_format" in record and "structured_outputs" in record:
            raise UserError("a line has either response_format or structured_outputs")
        return validate(cls, record)

    def sampling(self) -> Json:
        """The fields of SamplingParams that the line has."""
        given = given_sampling(self)
        if "response_format" in self.model_fields_set:
            given["structured_outputs"] = parse_response_format(self.response_format)
        return given


def build_request(
    record: Json, index: int, session: GenerationSession, defaults: SamplingParams
) -> GenerationRequest:
    """The request of a line. `defaults` are the configuration's; the line overrides them."""
    line = BatchLine.from_record(record)
    if line.messages:
        prompt_ids = session.encode_chat([message.to_json() for message in line.messages])
    elif isinstance(line.prompt, str):
        prompt_ids = session.encode_prompt(line.prompt)
    else:
        prompt_ids = line.prompt
    limit = session.max_new_tokens(prompt_ids)
    is_given = "max_new_tokens" in line.model_fields_set
    max_new_tokens = line.max_new_tokens if is_given else limit
    if not 1 <= max_new_tokens <= limit:
        raise UserError(
            f"max_new_tokens={max_new_tokens} must be between 1 and {limit}: the prompt has "
            f"{len(prompt_ids)} tokens and max_target_length={session.config.max_target_length}"
        )
    seed = session.config.init_weights_seed + index
    sampling = {"seed": seed, **line.sampling(), "max_new_tokens": max_new_tokens}
    params = dataclasses.replace(defaults, **sampling)
    return GenerationRequest(prompt_ids, params, line.adapter)


# Besides the model, the keys that decide the results. How they are computed (devices, blocks …)
# may change between two runs.
RESULT_KEYS = (
    "max_target_length",
    "max_prefill_predict_length",
    "add_bos",
    "use_chat_template",
    "chat_template",
    "chat_template_path",
    "tokenizer_path",
    "decode_sampling_strategy",
    "decode_sampling_temperature",
    "decode_sampling_top_k",
    "decode_sampling_nucleus_p",
    "init_weights_seed",
    "return_log_prob",
    "lora_input_adapters_path",
    "quantization",
    "quantize_kvcache",
    "kv_quant_dtype",
    "kv_quant_axis",
    "dtype",
    "weight_dtype",
    "matmul_precision",
)
USELESS = {
    "prompt": "the prompts are in the file",
    "load_parameters_path": "another argument names the model",
    "multi_sampling": "repeat the line: each has its own seed",
    "autoregressive_decode_assert": "it is about the completion of `maxtext decode`",
}
OTHERS_USELESS = {key: USELESS[key] for key in USELESS.keys() - {"load_parameters_path"}}


def run(arguments: Arguments) -> int:
    path, overwrite = arguments["--model"], arguments["--overwrite"]
    positional_args, overrides = positionals.split_overrides(arguments.all_args)
    if path is None and len(positional_args) == 3:
        path = positional_args.pop(0)
    if len(positional_args) != 2:
        raise ConfigError(
            "name a model and two files: maxtext batch MODEL IN.jsonl OUT.jsonl [--adapter DIR] "
            "[--overwrite] [key=value ...]"
        )
    named = path or model_path("maxtext batch MODEL IN.jsonl OUT.jsonl", None, overrides)
    requests, out = map(local_path, positional_args)
    check_files(requests, out)
    model = resolve_model(newest_step(named), None, overrides)
    refuse_useless(model.config, "batch", USELESS if path else OTHERS_USELESS)
    results = ResultFile(out, result_settings(model.path, model.config), overwrite)
    num_before = len(results)
    try:
        if not results.verify(requests):
            results.begin()
            print(f"all {num_before:,} requests of {requests} are completed in {out}")
            return 0
        if num_before:
            note(f"{num_before:,} requests are completed already")
        session = load_session(model)
        with Report(requests) as report:
            complete_all(session, requests, results, report)
    except KeyboardInterrupt:
        command = "the same command without --overwrite" if overwrite else "the same command"
        count = len(results) - num_before
        note(f"{count:,} more requests are completed in {out}; {command} resumes")
        raise
    finally:
        results.close()
    print(f"wrote {out}\n{format_table([*report.rows(), *draft_rows(session)], left=1)}", end="")
    return 0


def check_files(requests: Path, out: Path) -> None:
    if not requests.is_file():
        raise ConfigError(f"there is no file {requests}: it should have a request on each line")
    if out.exists() and (not out.is_file() or out.samefile(requests)):
        reason = "it is no regular file" if not out.is_file() else "it is the file of requests"
        raise ConfigError(f"{out} cannot take the results: {reason}; name another file")


def newest_step(path: str) -> str:
    """The folder of the model: of a run's checkpoints, the newest step now. The run may write newer
    ones, but all results come from the same model.
    """
    from maxtext.checkpoint import steps

    folder = find_folder(path)
    if not folder.is_dir():
        return path
    if steps.has_steps(folder):
        folder = steps.find_steps(folder)[-1]
    return str(folder.resolve())


def result_settings(path: str, config: MaxTextConfig) -> Json:
    """The settings that decide the results. A weight_dtype or a tokenizer that was not set is the
    checkpoint's, so the path of the model stands for it.
    """
    from maxtext.checkpoint.open import MODEL_KEYS

    settings = {key: getattr(config, key) for key in (*RESULT_KEYS, *sorted(MODEL_KEYS))}
    if config.source("weight_dtype").kind == "derived":
        settings["weight_dtype"] = base_values().weight_dtype
    if config.source("tokenizer_path").kind == "model":
        settings["tokenizer_path"] = base_values().tokenizer_path
    return settings | {"model": path}


def complete_all(
    session: GenerationSession, requests: Path, results: ResultFile, report: "Report"
) -> None:
    from maxtext.inference import SamplingParams

    logprobs = 0 if session.config.return_log_prob else None
    params = SamplingParams.from_config(session.config, logprobs=logprobs)
    # By the index of the request: its line, and the completions that it still has to get.
    running: dict[int, tuple[Line, Json]] = {}
    choices: dict[int, list[Any]] = {}
    indices = itertools.count()
    results.begin()

    def finish(line: Line, record: Json, result: Json, tokens: int) -> None:
        results.write(line, ({"id": record["id"]} if "id" in record else {}) | result)
        report(line, tokens, failed="error" in result)

    def read_requests() -> Iterator[Any]:
        for line in read_lines(requests):
            if results.has(line):
                report.skip(line)
                continue
            record: Json = {}
            try:
                record = parse_line(line.data)
                request = build_request(record, line.index, session, params)
            except UserError as error:
                finish(line, record, {"finished": "error", "error": str(error)}, 0)
                continue
            running[next(indices)] = line, record
            yield request

    for completion in session.llm.completions(read_requests()):
        if completion.index not in running:  # another choice of the request has failed
            continue
        finished = choices.setdefault(completion.index, [])
        finished.append(completion)
        line, record = running[completion.index]
        if len(finished) < record.get("n", 1) and not completion.error:
            continue
        del running[completion.index], choices[completion.index]
        result = result_record(finished, record, session.config.return_log_prob)
        finish(line, record, result, sum(len(each.token_ids) for each in finished))
    if running:
        raise UserError(f"{len(running)} requests were not completed: run the same command again")


def result_record(completions: list[Any], record: Json, log_probs: bool) -> Json:
    """A line of the results: the completion, or with n > 1 a list of them."""
    failed = next((each for each in completions if each.error), None)
    if failed is not None:
        return {"finished": "error", "error": failed.error}
    completions = sorted(completions, key=lambda completion: completion.choice)
    records = [completion_record(completion, record, log_probs) for completion in completions]
    return records[0] if record.get("n", 1) == 1 else {"choices": records}


def completion_record(completion: Any, record: Json, log_probs: bool) -> Json:
    """Text for a text prompt, ids for a prompt of ids."""
    is_text = not isinstance(record.get("prompt"), list)
    result: Json = {"text": completion.text} if is_text else {}
    if log_probs:
        result["log_probs"] = [round(each.logprob, 6) for each in completion.logprobs]
    if log_probs or not is_text:
        result["ids"] = list(completion.token_ids)
    return result | {"finished": completion.finish_reason}


def draft_rows(session: GenerationSession) -> list[tuple[str, str]]:
    """The acceptance of drafted tokens, if there are any."""
    engine = session.llm.engine
    if engine is None or not engine.drafts.num_drafted:
        return []
    drafts = engine.drafts
    share = drafts.num_accepted / drafts.num_drafted
    return [
        ("drafted tokens", f"{drafts.num_drafted:,}"),
        ("accepted", f"{drafts.num_accepted:,} ({share:.0%})"),
    ]


class Report:
    """Progress by bytes of the request file, whose lines are not counted before: a bar on a
    terminal, elsewhere a line now and then.
    """

    def __init__(self, requests: Path):
        self.total_bytes = requests.stat().st_size
        self.num_bytes = 0
        self.num_completed = 0
        self.num_failed = 0
        self.num_tokens = 0
        self.started_at = time.monotonic()
        self.logged_at = self.started_at
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
            self.task = self.bar.add_task("", total=self.total_bytes)
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar:
            self.bar.stop()

    def skip(self, line: Line) -> None:
        """A line that an earlier run has completed."""
        self.num_bytes += len(line.data)

    def __call__(self, line: Line, tokens: int, failed: bool) -> None:
        self.num_bytes += len(line.data)
        self.num_tokens += tokens
        self.num_completed += 1
        self.num_failed += failed
        now = time.monotonic()
        if not self.bar and now - self.logged_at < LOG_SECONDS:
            return
        self.logged_at = now
        rate = self.num_tokens / max(now - self.started_at, 1e-9)
        description = f"{self.num_completed:,} requests, {rate:,.0f} tokens/s"
        if self.bar:
            self.bar.update(self.task, completed=self.num_bytes, description=description)
        else:
            share = self.num_bytes / self.total_bytes
            print(f"{share:.0%}: {description}", file=sys.stderr, flush=True)

    def rows(self) -> list[tuple[str, str]]:
        seconds = max(time.monotonic() - self.started_at, 1e-9)
        return [
            ("requests", f"{self.num_completed:,}"),
            ("with errors", f"{self.num_failed:,}"),
            ("tokens", f"{self.num_tokens:,}"),
            ("tokens/s", f"{self.num_tokens / seconds:,.1f}"),
        ]
