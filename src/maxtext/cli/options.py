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
    "--force", help="start even if the run seems to need too much memory",
    overrides="check_memory=false",
)  # fmt: skip
JSON = Option("--json", help="machine-readable output")

EVALUATE = (ADAPTER, JSON)
DISTILL_LOGITS = (Option("--top-k", "K", "logits per token", whole_number(1), is_required=True),)
LAUNCH = (
    Option(
        "--local", "N", "number of processes on this machine; if one fails, all are stopped",
        whole_number(1),
    ),
    Option(
        "--restarts", "K",
        "after a failure, restart all processes from the last checkpoint, at most K times",
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
        "seconds for a last checkpoint when the run is stopped (default: 60; on clusters 120)",
        whole_number(1),
    ),
    Option(
        "--print", "k8s|slurm", "print a Kubernetes JobSet or a Slurm batch script",
        one_of("k8s", "slurm"),
    ),
    Option("--nodes", "N", "number of nodes", whole_number(1), needs=("--print",)),
    Option("--gpus-per-node", "G", "GPUs per node", whole_number(1), needs=("--print",)),
    Option("--name", "NAME", "name of the job (default: maxtext)", needs=("--print",)),
    Option(
        "--tpu-topology", "TYPE:SHAPE", "k8s: type and shape of TPU slices, such as v5p:4x4x4",
        needs=("--print",),
    ),
    Option("--slices", "S", "k8s: number of TPU slices", whole_number(1), needs=("--print",)),
    Option("--image", "IMAGE", "k8s: container image", ANY_TEXT, needs=("--print",)),
    Option("--volume", "CLAIM", "k8s: claim of the output volume", ANY_TEXT, needs=("--print",)),
    Option("--time", "HH:MM:SS", "slurm: time limit (default: 24:00:00)", needs=("--print",)),
)  # fmt: skip
CHAT = (
    Option(
        "--adapter", "DIR", "a PEFT adapter of the model", overrides="lora_input_adapters_path",
        excludes=("--server",),
    ),
    Option(
        "--server", "URL",
        "chat with a server that has OpenAI's API, such as http://127.0.0.1:8000", ANY_TEXT,
    ),
    Option(
        "--api-key", "KEY", "the server's key", API_KEY, variable=KEY_VARIABLE,
        needs=("--server",),
    ),
    Option(
        "--model", "NAME", "a model of the server (default: its first)", ANY_TEXT,
        needs=("--server",),
    ),
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
    Option("--port", "PORT", "port; 0: any free port", whole_number(0, 65535), default=8000),
    Option(
        "--uds", "PATH", "a Unix socket, instead of an address", excludes=("--host", "--port")
    ),
    Option(
        "--served-model-name", "NAME ...",
        "names of the model that requests may use (default: the name of MODEL)", ANY_TEXT,
    ),
    Option(
        "--adapter", "DIR",
        "a PEFT adapter (a folder, or org/name of the Hub), or a folder of adapters; each is "
        "served as a model under its own name",
        overrides="lora_input_adapters_path", excludes=("--lora",),
    ),
    Option(
        "--lora", "NAME=DIR ...", "adapters by name, instead of --adapter", NAMED_ADAPTER,
        aliases=("--lora-modules",),
    ),
    Option("--allow-lora-updates", help="let requests load adapters from below --lora-root, and "
           "drop adapters", needs=("--lora-root",)),
    Option("--lora-root", "DIR", "folder of the adapters that requests may load", PATH,
           needs=("--allow-lora-updates",)),
    Option(
        "--api-key", "KEY ...", "keys; every request needs one of them", API_KEY,
        variable=KEY_VARIABLE,
    ),
    Option(
        "--allowed-hosts", "NAME ...",
        "host names that clients may use for the server, besides IP addresses, names without a dot "
        "such as localhost, and --host; .NAME: NAME and its subdomains; *: any name",
        HOST,
    ),
    Option(
        "--cors", "ORIGIN ...",
        "other origins whose pages may use the server from a browser (default: none)", ORIGINS,
    ),
    Option(
        "--max-queue", "N", "number of sequences that may wait for a slot", whole_number(0),
        default=1024,
    ),
    Option(
        "--request-timeout", "S",
        "seconds from the arrival of a request to its last token; 0: no limit",
        whole_number(0), default=600,
    ),
    Option(
        "--drain-timeout", "S", "seconds that running requests have to finish after SIGTERM",
        whole_number(0), default=30,
    ),
    Option(
        "--max-body", "BYTES", "the largest request body", whole_number(1), default=4 * 2**20
    ),
    Option(
        "--max-logprobs", "N", "the largest logprobs or top_logprobs that a request may ask for",
        whole_number(0, MAX_LOGPROBS), default=20,
    ),
    Option("--ssl-certfile", "FILE", "certificate for TLS"),
    Option("--ssl-keyfile", "FILE", "private key of the certificate"),
    Option("--ssl-ca-certs", "FILE", "require a client certificate from one of these authorities"),
    Option("--root-path", "PATH", "the prefix that a proxy strips", ROOT_PATH),
    Option(
        "--default-chat-template-kwargs", "JSON",
        'variables of the chat template, such as {"enable_thinking": false}', JSON_OBJECT,
    ),
    Option(
        "--generation-config", "auto|none|vllm",
        "whether generation_config.json sets sampling defaults (default: auto; vllm means none)",
        one_of("auto", "none", "vllm"),
    ),
    Option(
        "--tool-call-parser", "NAME",
        "format of tool calls in the text: hermes, llama3_json, mistral, qwen3_coder, glm45, "
        "minimax_m2, seed_oss, harmony or none (default: by the chat template)",
        one_of(
            "hermes", "llama3_json", "mistral", "qwen3_coder", "glm45", "minimax_m2", "seed_oss",
            "harmony", "none", "gpt_oss",
        ),
    ),
    Option(
        "--reasoning-parser", "NAME",
        "format of reasoning in the text: think, seed_oss, harmony or none (default: by the chat "
        "template)",
        one_of("think", "seed_oss", "harmony", "none", "gpt_oss"),
    ),
    Option(
        "--metrics-prefix", "maxtext|vllm", "prefix of metric names",
        one_of("maxtext", "vllm"), default="maxtext",
    ),
    Option("--protect-metrics", help="require a key for /metrics"),
    Option("--strict-fields", help="reject requests with unknown fields"),
    Option("--no-tools", help="reject requests with tools"),
    Option("--log-requests", help="log a line for each request, without its text"),
    Option("--log-prompts", help="also log the prompts"),
    Option("--no-page", help="serve no chat page at /"),
)  # fmt: skip
EVAL = (
    Option(
        "--perplexity", "FILE", "another way to name the texts", excludes=("--tasks", "--builtin")
    ),
    Option(
        "--window", "N", "perplexity: tokens per window (default: max_target_length)",
        whole_number(2), excludes=("--tasks", "--builtin"),
    ),
    Option(
        "--stride", "N",
        "perplexity: tokens from the start of a window to the start of the next; a smaller stride "
        "gives each token more context (default: --window)",
        whole_number(1), excludes=("--tasks", "--builtin"),
    ),
    Option(
        "--tasks", "A,B", "tasks of lm-eval: names, groups, tags or patterns",
        excludes=("--builtin",),
    ),
    Option("--include-path", "FOLDER", "a folder of YAML files with further tasks",
           needs=("--tasks",)),
    Option(
        "--num-fewshot", "N", "solved examples before each question (default: the task's number)",
        whole_number(0), needs=("--tasks",),
    ),
    Option("--builtin", "NAME,...", "benchmarks generated from a seed; all: every benchmark"),
    Option("--seed", "N", "seed of the questions", whole_number(0), default=0,
           needs=("--builtin",)),
    Option(
        "--limit", "N", "questions per task", whole_number(1), needs=("--tasks", "--builtin")
    ),
    Option(
        "--apply-chat-template", help="send questions as chat messages",
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
    Option("--api-key", "KEY", "the server's key", ANY_TEXT, variable=KEY_VARIABLE),
    Option("--model", "NAME", "a model of the server (default: its first)", ANY_TEXT),
    Option("--streams", "N", "closed loop: N requests at a time (default: 16)", whole_number(1)),
    Option(
        "--rate", "R", "open loop: R requests per second, at random times; inf: all at once",
        positive_number(allow_infinite=True), excludes=("--streams",),
    ),
    Option("--requests", "N", "number of requests", whole_number(1)),
    Option("--duration", "S", "seconds for which to send requests (default: 30)",
           positive_number(), excludes=("--requests",)),
    Option("--prompt-tokens", "A[-B]", "tokens per prompt, uniformly distributed (default: 128)",
           TOKEN_RANGE),
    Option("--new-tokens", "A[-B]",
           "tokens per completion, uniformly distributed (default: 64)", TOKEN_RANGE),
    Option("--seed", "N", "seed of lengths, tokens and arrival times", whole_number(0), default=0),
    Option("--timeout", "S", "seconds per request", positive_number(), default=600),
    Option("--json", "OUT", "write the results as JSON", PATH),
    Option("--plot", "OUT.png", "plot the distributions, and throughput and requests over time",
           PATH),
)  # fmt: skip
CONVERT = (
    Option("--dtype", "DTYPE", "dtype of all floating-point weights: float32, bfloat16 or float16 "
           "(default: unchanged)", DTYPE),
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
        "--format", "yaml|json", "machine-readable output; the YAML can be used as a FILE",
        one_of("yaml", "json"),
    ),
)  # fmt: skip
INSPECT = (
    Option(
        "--verify", help="read every file, and compare it with its recorded checksum"
    ),
    JSON,
)  # fmt: skip
DATA_INSPECT = (
    Option("--batches", "N", "number of batches to read", whole_number(1), default=1),
    Option(
        "--rows", "N", "rows to show from each batch; 0: only statistics", whole_number(0),
        default=4,
    ),
    Option("--eval", help="show evaluation data"),
    JSON,
)  # fmt: skip
DATA_PREPARE = (
    Option("--out", "DIR", "a new or empty folder, or one to resume", PATH, is_required=True),
    Option("--workers", "N", "number of processes (default: one per core)", whole_number(1)),
    Option(
        "--shard-documents", "N", "documents per file (default: by the size of the data)",
        whole_number(1),
    ),
)  # fmt: skip
DATA_INDEX = (
    Option("--out", "INDEX.json", "the file to write", is_required=True),
    Option("--length", "N", "tokens per row", whole_number(2), is_required=True),
    Option("--dtype", "DTYPE", "dtype of the tokens", default="uint32"),
)
TOKENIZER_TRAIN = (
    Option("--out", "PATH", "a folder for bpe, a *.model file for the other kinds",
           is_required=True),
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
        "limit of training text in characters, sampled over all documents (max_corpus_chars=N)",
        overrides="max_corpus_chars",
    ),
    Option("--overwrite", help="replace an existing PATH"),
)  # fmt: skip
ESTIMATE = (
    Option(
        "--target", "NAME",
        "cpu, cpu:8, gpu, or a TPU slice such as v5p:4x4x4 or v5p-128 (default: compile_topology, "
        "else this machine)",
    ),
    Option("--slices", "N", "number of slices of a TPU target", whole_number(0)),
    Option("--no-compile", help="estimate by arithmetic, without compiling the step"),
    Option(
        "--search", help="also compile the suggestions, to confirm them",
        excludes=("--no-compile",),
    ),
    Option("--format", "json", "machine-readable output", one_of("json")),
)  # fmt: skip
