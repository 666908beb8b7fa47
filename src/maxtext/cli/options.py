"""The options of the command line: one row each, which gives its parsing, `--help`, completion and
"did you mean". Flags of `vllm serve` are in vllm_flags.py.
"""

import json
import re

from maxtext.cli.arguments import (
    ANY_TEXT,
    Option,
    ValueType,
    one_of,
    positive_number,
    whole_number,
)
from maxtext.common.files import local_path
from maxtext.common.types import Json

ALLOWED_HOST = re.compile(r"\*|(\.?[\w-]+(\.[\w-]+)*|\[[0-9a-f:]+\])(:[0-9]+)?", re.ASCII)
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@A-Z]+")  # of a page; browsers send lower case
KEY_VARIABLE = "MAXTEXT_API_KEY"
MAX_LOGPROBS = 128  # of inference/sampling/logprobs.py, whose import takes seconds


def read_host(text: str) -> str:
    """In lower case, as browsers send it."""
    if not ALLOWED_HOST.fullmatch(text.lower()):
        raise ValueError
    return text.lower()


def read_origin(text: str) -> str:
    """As browsers send it: another text would never match."""
    if text != "*" and not ORIGIN.fullmatch(text):
        raise ValueError
    return text


def read_root_path(text: str) -> str:
    if not text.startswith("/") or text.endswith("/"):
        raise ValueError
    return text


def read_json_object(text: str) -> Json:
    try:
        value = json.loads(text)
    except RecursionError:
        value = None
    if not isinstance(value, dict):
        raise ValueError
    return value


def read_adapter(text: str) -> tuple[str, str]:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise ValueError
    return name, folder


def read_header(text: str) -> str:
    """Raises ValueError for characters that an HTTP header may not have."""
    if not (text.isascii() and text.isprintable() and text.strip() == text):
        raise ValueError
    return text


def read_token_range(text: str) -> tuple[int, int]:
    """A whole number above 0, or two of them as LOW-HIGH."""
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise ValueError
    return low, high


HOST = ValueType(
    "names such as chat.example, .example for its subdomains, chat.example:8443 for the origin of "
    "a page, or *",
    read_host,
)
ORIGINS = ValueType(
    "origins such as https://chat.example:8443, without a path", read_origin, is_local=False
)
ROOT_PATH = ValueType("a path such as /model, with a slash at its beginning only", read_root_path)
JSON_OBJECT = ValueType(
    'a JSON object such as {"enable_thinking": false}', read_json_object, is_local=False
)
NAMED_ADAPTER = ValueType("NAME=DIR", read_adapter)
API_KEY = ValueType(
    "a key without characters that a header may not have", read_header, is_local=False
)
PATH = ValueType("a path", local_path)
TOKEN_RANGE = ValueType("a number or a range such as 64-1024", read_token_range)
DTYPE = one_of("float32", "bfloat16", "float16")

ADAPTER = Option(
    "--adapter", "DIR", "a PEFT adapter of the model", overrides="lora_input_adapters_path"
)
FORCE = Option(
    "--force", help="start even if the memory seems too small", overrides="check_memory=false"
)
JSON = Option("--json", help="machine-readable output")

EVALUATE = (ADAPTER, JSON)
DISTILL_LOGITS = (Option("--top-k", "K", "logits per token", whole_number(1), is_required=True),)
LAUNCH = (
    Option("--local", "N", "number of processes; if one fails, all are stopped", whole_number(1)),
    Option(
        "--restarts", "K", "restart all from the last checkpoint, at most K times",
        whole_number(0),
    ),
    Option(
        "--devices-per-process", "D",
        "GPUs of each process (default: all, divided evenly); on CPUs, the number of simulated "
        "devices",
        whole_number(1), needs=("--local",),
    ),
    Option("--cpu", help="do not use accelerators", needs=("--local",)),
    Option(
        "--grace", "S",
        "seconds for a last checkpoint when the run is stopped (60; on clusters 120)",
        whole_number(1),
    ),
    Option(
        "--print", "k8s|slurm", "print a Kubernetes JobSet or a Slurm batch script",
        one_of("k8s", "slurm"),
    ),
    Option("--nodes", "N", "nodes of the job", whole_number(1), needs=("--print",)),
    Option("--gpus-per-node", "G", "GPUs per node", whole_number(1), needs=("--print",)),
    Option("--name", "NAME", "name of the job (maxtext)", needs=("--print",)),
    Option(
        "--tpu-topology", "TYPE:SHAPE", "TPU slices, such as v5p:4x4x4 (k8s)", needs=("--print",)
    ),
    Option("--slices", "S", "number of TPU slices (k8s)", whole_number(1), needs=("--print",)),
    Option("--image", "IMAGE", "container image (k8s)", ANY_TEXT, needs=("--print",)),
    Option("--volume", "CLAIM", "claim of the output volume (k8s)", ANY_TEXT, needs=("--print",)),
    Option("--time", "HH:MM:SS", "time limit (slurm: 24:00:00)", needs=("--print",)),
)  # fmt: skip
CHAT = (
    Option(
        "--adapter", "DIR", "a PEFT adapter of the model", overrides="lora_input_adapters_path",
        excludes=("--server",),
    ),
    Option(
        "--server", "URL", "a server with OpenAI's API, such as http://127.0.0.1:8000", ANY_TEXT
    ),
    Option(
        "--api-key", "KEY", "key of the server", API_KEY, variable=KEY_VARIABLE,
        needs=("--server",),
    ),
    Option("--model", "NAME", "a model of the server (its first)", ANY_TEXT, needs=("--server",)),
)  # fmt: skip
BATCH = (
    Option("--model", "MODEL", "another way to name the model"),
    Option(
        "--adapter", "DIR", "a PEFT adapter of the model, or a folder of adapters",
        overrides="lora_input_adapters_path",
    ),
    Option("--overwrite", help="discard an existing OUT.jsonl"),
)  # fmt: skip
SERVE = (
    Option("--host", "HOST", "address to listen on", ANY_TEXT, default="127.0.0.1"),
    Option("--port", "PORT", "port; 0: a free port", whole_number(0, 65535), default=8000),
    Option("--uds", "PATH", "a Unix socket instead", excludes=("--host", "--port")),
    Option(
        "--served-model-name", "NAME ...", "names that requests may use (the name of MODEL)",
        ANY_TEXT,
    ),
    Option(
        "--adapter", "DIR",
        "a PEFT adapter (a folder, or org/name of the Hub), or a folder of adapters; each is "
        "served as a model under its name",
        overrides="lora_input_adapters_path", excludes=("--lora",),
    ),
    Option(
        "--lora", "NAME=DIR ...", "adapters by name, instead of --adapter", NAMED_ADAPTER,
        aliases=("--lora-modules",),
    ),
    Option("--allow-lora-updates", help="let requests load adapters below --lora-root, and drop "
           "adapters", needs=("--lora-root",)),
    Option("--lora-root", "DIR", "folder of the adapters that requests may load", PATH,
           needs=("--allow-lora-updates",)),
    Option(
        "--api-key", "KEY ...", "keys; a request needs one of them", API_KEY,
        variable=KEY_VARIABLE,
    ),
    Option(
        "--allowed-hosts", "NAME ...",
        "host names that clients may use, besides IP addresses, names without a dot such as "
        "localhost, and --host; .NAME: NAME and its subdomains; *: any",
        HOST,
    ),
    Option(
        "--cors", "ORIGIN ...",
        "other origins whose pages may use the server from a browser (none)", ORIGINS,
    ),
    Option(
        "--max-queue", "N", "requests that may wait for a slot", whole_number(0), default=1024
    ),
    Option(
        "--request-timeout", "S", "seconds from arrival to the last token; 0: no limit",
        whole_number(0), default=600,
    ),
    Option(
        "--drain-timeout", "S", "seconds that running requests have after SIGTERM", whole_number(0),
        default=30,
    ),
    Option("--max-body", "BYTES", "largest request body", whole_number(1), default=4 * 2**20),
    Option(
        "--max-logprobs", "N", "the largest logprobs or top_logprobs that a request may ask for",
        whole_number(0, MAX_LOGPROBS), default=20,
    ),
    Option("--ssl-certfile", "FILE", "certificate for TLS"),
    Option("--ssl-keyfile", "FILE", "private key of the certificate"),
    Option("--ssl-ca-certs", "FILE", "authorities that sign clients' certificates"),
    Option("--root-path", "PATH", "the prefix that a proxy strips", ROOT_PATH),
    Option(
        "--default-chat-template-kwargs", "JSON",
        'variables of the chat template, such as {"enable_thinking": false}', JSON_OBJECT,
    ),
    Option(
        "--generation-config", "auto|none|vllm",
        "whether generation_config.json sets sampling defaults (auto; vllm: none)",
        one_of("auto", "none", "vllm"),
    ),
    Option(
        "--tool-call-parser", "NAME",
        "form of tool calls in the text: hermes, llama3_json, mistral, qwen3_coder, glm45, "
        "minimax_m2, seed_oss, harmony or none (by the chat template)",
        one_of(
            "hermes", "llama3_json", "mistral", "qwen3_coder", "glm45", "minimax_m2", "seed_oss",
            "harmony", "none", "gpt_oss",
        ),
    ),
    Option(
        "--reasoning-parser", "NAME",
        "form of reasoning in the text: think, seed_oss, harmony or none (by the chat template)",
        one_of("think", "seed_oss", "harmony", "none", "gpt_oss"),
    ),
    Option(
        "--metrics-prefix", "maxtext|vllm", "prefix of metric names",
        one_of("maxtext", "vllm"), default="maxtext",
    ),
    Option("--protect-metrics", help="/metrics also needs a key"),
    Option("--strict-fields", help="reject requests with unknown fields"),
    Option("--no-tools", help="reject requests with tools"),
    Option("--log-requests", help="log a line for each request, without its text"),
    Option("--log-prompts", help="also log the prompts"),
    Option("--no-page", help="no chat page at /"),
)  # fmt: skip
EVAL = (
    Option(
        "--perplexity", "FILE", "another way to name the texts", excludes=("--tasks", "--builtin")
    ),
    Option(
        "--window", "N", "tokens per window, for perplexity (max_target_length)", whole_number(2),
        excludes=("--tasks", "--builtin"),
    ),
    Option(
        "--stride", "N", "tokens between windows (--window); smaller: more context",
        whole_number(1), excludes=("--tasks", "--builtin"),
    ),
    Option(
        "--tasks", "A,B", "tasks of lm-eval: names, groups, tags or patterns",
        excludes=("--builtin",),
    ),
    Option("--include-path", "FOLDER", "YAML files of further tasks", needs=("--tasks",)),
    Option(
        "--num-fewshot", "N", "examples before each question (the task's)", whole_number(0),
        needs=("--tasks",),
    ),
    Option("--builtin", "NAME,...", "benchmarks that are generated from a seed; all: every one"),
    Option("--seed", "N", "seed of the questions", whole_number(0), default=0,
           needs=("--builtin",)),
    Option(
        "--limit", "N", "questions per task", whole_number(1), needs=("--tasks", "--builtin")
    ),
    Option(
        "--apply-chat-template", help="ask questions as messages of a chat",
        needs=("--tasks", "--builtin"),
    ),
    ADAPTER,
    Option(
        "--json", "OUT", "write a report: scores with standard errors, versions, settings", PATH
    ),
)  # fmt: skip
BENCH_SERVE = (
    Option(
        "--url", "URL", "address of the server", ANY_TEXT, default="http://127.0.0.1:8000"
    ),
    Option("--api-key", "KEY", "key of the server", ANY_TEXT, variable=KEY_VARIABLE),
    Option("--model", "NAME", "a model of the server (its first)", ANY_TEXT),
    Option("--streams", "N", "closed loop: N requests at a time (16)", whole_number(1)),
    Option(
        "--rate", "R", "open loop: R requests per second, at random times; inf: all at once",
        positive_number(allow_infinite=True), excludes=("--streams",),
    ),
    Option("--requests", "N", "number of requests", whole_number(1)),
    Option("--duration", "S", "seconds in which requests are sent (30)", positive_number(),
           excludes=("--requests",)),
    Option("--prompt-tokens", "A[-B]", "length of prompts, uniformly distributed (128)",
           TOKEN_RANGE),
    Option("--new-tokens", "A[-B]", "length of completions (64)", TOKEN_RANGE),
    Option("--seed", "N", "seed of lengths, tokens and arrival times", whole_number(0), default=0),
    Option("--timeout", "S", "seconds per request", positive_number(), default=600),
    Option("--json", "OUT", "write the numbers as JSON", PATH),
    Option("--plot", "OUT.png", "draw distributions and time lines", PATH),
)  # fmt: skip
CONVERT = (
    Option("--dtype", "DTYPE", "dtype of all floating-point weights: float32, bfloat16 or float16 "
           "(unchanged)", DTYPE),
)  # fmt: skip
TO_HF = (
    *CONVERT,
    Option(
        "--text-only", help="write only the text model of a checkpoint with vision or audio tensors"
    ),
)  # fmt: skip
CONFIG = (
    Option("--changed", help="show only keys that differ from base.yml"),
    Option(
        "--format", "yaml|json", "machine-readable; the YAML can be used as a FILE",
        one_of("yaml", "json"),
    ),
)  # fmt: skip
INSPECT = (
    Option(
        "--verify", help="read every file and compare it with its recorded checksum"
    ),
    JSON,
)  # fmt: skip
DATA_INSPECT = (
    Option("--batches", "N", "number of batches", whole_number(1), default=1),
    Option("--rows", "N", "rows to show from each batch", whole_number(0), default=4),
    Option("--eval", help="show evaluation data"),
    JSON,
)
DATA_PREPARE = (
    Option("--out", "DIR", "a new or empty folder, or one to resume", PATH, is_required=True),
    Option("--workers", "N", "processes (all cores)", whole_number(1)),
    Option(
        "--shard-documents", "N", "documents per file (by the size of the data)", whole_number(1)
    ),
)  # fmt: skip
DATA_INDEX = (
    Option("--out", "INDEX.json", "the file to write", is_required=True),
    Option("--length", "N", "tokens per row", whole_number(2), is_required=True),
    Option("--dtype", "DTYPE", "dtype of the tokens", default="uint32"),
)
TOKENIZER_TRAIN = (
    Option("--out", "PATH", "a folder for bpe, a file.model for the other kinds", is_required=True),
    Option(
        "--kind", "KIND",
        "bpe (byte level, tokenizer.json), sentencepiece (unigram), or sentencepiece-bpe",
        one_of("bpe", "sentencepiece", "sentencepiece-bpe"), default="bpe",
    ),
    Option(
        "--vocab-size", "N", "number of ids, including special tokens (vocab_size=N)",
        overrides="vocab_size",
    ),
    Option(
        "--column", "NAME", "text column of records (train_data_columns=NAME)",
        overrides=lambda name: [f"train_data_columns={json.dumps([name])}"],
    ),
    Option(
        "--max-chars", "N",
        "characters of training text, sampled over all documents (max_corpus_chars=N)",
        overrides="max_corpus_chars",
    ),
    Option("--overwrite", help="replace an existing PATH"),
)  # fmt: skip
ESTIMATE = (
    Option(
        "--target", "NAME",
        "cpu, cpu:8, gpu, or a TPU slice such as v5p:4x4x4 or v5p-128 (compile_topology, else this "
        "machine)",
    ),
    Option("--slices", "N", "number of slices of a TPU target", whole_number(0)),
    Option("--no-compile", help="estimate from shapes only"),
    Option(
        "--search", help="also compile the suggestions, to confirm them",
        excludes=("--no-compile",),
    ),
    Option("--format", "json", "machine-readable output", one_of("json")),
)  # fmt: skip
