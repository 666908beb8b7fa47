"""The `maxtext` command: finds the verb, runs it, and turns errors into sentences and exit codes.

Only the standard library is imported here, so that help is instant; a verb's module is imported
when it runs.
"""

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from maxtext.common import progress, signals


@dataclass(frozen=True)
class Verb:
    summary: str
    example: str
    usage: str = "[FILE] [key=value ...]"
    details: str = ""
    settings: bool = True  # takes a FILE and key=value words


VERBS = {
    "train": Verb("train a model", "maxtext train quickstart"),
    "launch": Verb(
        "train with several processes of this machine, or write the files for a cluster",
        "maxtext launch --local 2 --restarts 3 -- train quickstart",
        "--local N [--restarts K] [--devices-per-process D] [--cpu] [--grace S] -- train ...\n"
        "       maxtext launch --print k8s|slurm [--nodes N] [--gpus-per-node G] [--name NAME] ... -- train ...",
        "  --local N                  so many processes; when one fails, all are stopped\n"
        "  --restarts K               then start all again from the last checkpoint, at most K times\n"
        "  --devices-per-process D    GPUs of each (else all, evenly); on CPUs, make believe that there are so many\n"
        "  --cpu                      leave accelerators alone\n"
        "  --grace S                  seconds for a last save when the run is told to stop (60; clusters 120)\n"
        "  --print k8s                a JobSet for Kubernetes on standard output; also takes\n"
        "                             --tpu-topology v5p:4x4x4 --slices S --image IMAGE --volume CLAIM\n"
        "  --print slurm              a batch script on standard output; also takes --time 24:00:00\n"
        "  elastic_enabled=true       with --local: go on with fewer processes when one is lost\n",
        settings=False,
    ),
    "decode": Verb(
        "complete a prompt with a model, as it comes",
        'maxtext decode load_parameters_path=~/models/Qwen3-0.6B prompt="I love to"',
        details="  load_parameters_path=DIR          a Hugging Face folder, one of ours, or a run with checkpoints\n"
        "  prompt=TEXT                       with use_chat_template=true, a message of a user\n"
        "  max_target_length=N               tokens of the prompt and the completion together\n"
        "  decode_sampling_strategy=WORD     greedy, weighted, topk, nucleus or composite\n"
        "  multi_sampling=true               per_device_batch_size completions\n"
        "  return_log_prob=true              each token with its log-probability\n",
    ),
    "chat": Verb(
        "talk with a model",
        "maxtext chat ~/models/Qwen3-0.6B decode_sampling_strategy=weighted",
        "DIR [key=value ...]",
        "  DIR         a Hugging Face folder, one of ours, or a run with checkpoints\n"
        "  key=value   any key of base.yml, such as max_target_length, decode_sampling_strategy, chat_template_path\n"
        "  /help       while talking, lists the commands; Ctrl-C stops an answer\n",
        settings=False,
    ),
    "batch": Verb(
        "answer a file of requests; a job that was stopped goes on",
        "maxtext batch questions.jsonl answers.jsonl --model ~/models/Qwen3-0.6B",
        "IN.jsonl OUT.jsonl --model DIR [--overwrite] [key=value ...]",
        '  IN.jsonl      a request a line: {"prompt": "I love to"} or {"messages": [...]}, and if need be id, seed,\n'
        "                stop, max_new_tokens, temperature, top_k, top_p\n"
        '  OUT.jsonl     an answer a line, as they finish: {"index": 0, "text": "...", "finished": "end", ...}\n'
        "  --model DIR   a Hugging Face folder, one of ours, or a run with checkpoints\n"
        "  --overwrite   begin anew\n"
        "  key=value     any key of base.yml\n",
        settings=False,
    ),
    "bench": Verb(
        "measure how fast a model reads prompts and writes tokens, by batch and length",
        "maxtext bench inference model_name=qwen3-0.6b per_device_batch_size=4",
        "inference [FILE] [key=value ...]",
        "  load_parameters_path=DIR or model_name=NAME         the model; a name has random weights\n"
        "  per_device_batch_size=N                             batches of 1, 2, 4 … up to N a device\n"
        "  inference_microbenchmark_prefill_lengths=64,1024    lengths of prompts\n"
        "  inference_microbenchmark_stages=prefill,generate    what to measure\n"
        "  inference_microbenchmark_log_file_path=FILE         the same as JSON\n"
        "  multi_sampling=true                                 also several completions of one prompt\n",
    ),
    "convert": Verb(
        "turn a Hugging Face folder into a checkpoint of ours, or back; take the weights out of a training checkpoint",
        "maxtext convert from_hf ~/models/Qwen3-0.6B qwen3",
        "from_hf DIR OUT [--dtype float32|bfloat16|float16]\n"
        "       maxtext convert to_hf CHECKPOINT OUT [--dtype float32|bfloat16|float16] [--text-only]\n"
        "       maxtext convert params-only CHECKPOINT OUT [--dtype float32|bfloat16|float16]",
        "  from_hf   safetensors, config.json and tokenizer of a supported family -> weights by layer, config.yml\n"
        "  to_hf     the way back; what came with the model from Hugging Face goes along\n"
        "  params-only   of a training checkpoint (a run's folder, its checkpoints, or one step): its newest weights\n"
        "            without the optimizer, by layer, with config.yml\n"
        "  --dtype   of all floating weights; without it every tensor keeps its own\n"
        "  --text-only   write the text model alone of a folder that had vision or audio tensors, too\n",
        settings=False,
    ),
    "config": Verb(
        "show a configuration, where each value comes from, and what keys mean",
        "maxtext config model_name=llama3.1-8b --changed",
        "[FILE] [key=value ...] [--changed] [--format yaml|json]\n"
        "       maxtext config explain KEY [FILE] [key=value ...]\n"
        "       maxtext config status",
        "  --changed            only what differs from base.yml\n"
        "  --format yaml|json   for another program; yaml can be read back as a FILE\n"
        "  explain KEY          type, default, meaning, source, and whether the key acts\n"
        "  status               which keys act, which do not, and why\n",
    ),
    "inspect": Verb(
        "show what a checkpoint holds and whether its files are whole",
        "maxtext inspect maxtext_output/my_run --verify",
        "DIR [--verify] [--json]",
        "  DIR        a run's folder, its checkpoints, one step, or a folder of safetensors\n"
        "  --verify   read every file and compare it with the sums that were written after the save\n"
        "  --json     for another program\n",
        settings=False,
    ),
    "data": Verb(
        "see the batches of a configuration, prepare tokens ahead of training, measure the pipeline",
        "maxtext data inspect quickstart --batches 20 --rows 2",
        "inspect [FILE] [key=value ...] [--batches N] [--rows N] [--eval] [--json]\n"
        "       maxtext data prepare --out DIR [--workers N] [--shard-documents N] [FILE] [key=value ...]\n"
        "       maxtext data throughput [FILE] [key=value ...]",
        "  inspect      decoded batches, a colour a segment, and how well rows are filled; no device is needed\n"
        "    --batches N          so many (1)\n"
        "    --rows N             of each batch that are shown (4)\n"
        "    --eval               those of evaluation\n"
        "    --json               for another program\n"
        "  prepare      the training documents as ArrayRecord files of tokens; a run that was stopped goes on\n"
        "    --out DIR            a new or empty folder, or one to go on with\n"
        "    --workers N          processes (all cores)\n"
        "    --shard-documents N  in a file (by the size of the data)\n"
        "  throughput   load `steps` batches as training would, and say how fast\n",
    ),
    "tokenizer": Verb(
        "train a tokenizer on local files, or show what one is and what it does to a text",
        'maxtext tokenizer inspect byte "Grüße"',
        "train [--kind KIND] [--vocab-size N] [--column NAME] [--max-chars N] --out PATH [--overwrite] FILES...\n"
        "       maxtext tokenizer inspect PATH [TEXT] [--json]",
        "  FILES            text, jsonl (also .gz), parquet, arrow, tfrecord or arrayrecord files, folders or globs\n"
        "  --out PATH       a folder for bpe, a file.model for the others\n"
        "  --kind KIND      bpe (byte level, tokenizer.json; the default), sentencepiece (unigram), sentencepiece-bpe\n"
        "  --vocab-size N   ids, special tokens among them (vocab_size=N)\n"
        "  --column NAME    of the text in records (train_data_columns=NAME)\n"
        "  --max-chars N    of text to learn from, spread over all documents (max_corpus_chars=N)\n"
        "  --overwrite      replace what is at PATH\n"
        "  inspect PATH     a file, a folder, byte, or a name on the Hugging Face hub\n"
        "  --json           for another program\n",
        settings=False,
    ),
    "models": Verb(
        "list the named models with their sizes, or one with its parts",
        "maxtext models qwen3-30b-a3b",
        "[NAME]",
        settings=False,
    ),
    "estimate": Verb(
        "tell whether a training step fits on a target, and what would fit better",
        "maxtext estimate model_name=llama2-7b --target v5p:4x4x4 --no-compile",
        "[FILE] [key=value ...] [--target NAME] [--slices N] [--no-compile] [--search] [--format json]",
        "  --target NAME   cpu, cpu:8, gpu, or a TPU slice such as v5p:4x4x4 or v5p-128;\n"
        "                  without it compile_topology, else this machine\n"
        "  --slices N      so many slices of a TPU target\n"
        "  --no-compile    arithmetic from shapes only\n"
        "  --search        compile the suggestions, too, to confirm them\n"
        "  --format json   for another program\n",
    ),
    "compile": Verb(
        "compile the train step ahead of time, for this machine or a TPU slice",
        "maxtext compile quickstart compiled_trainstep_file=step.bin",
        details="  compiled_trainstep_file=FILE      where to write; maxtext train loads it by the same key\n"
        "  compile_topology=v5p-128          the target; without it this machine\n"
        "  compile_topology_num_slices=1     of the target\n",
    ),
    "doctor": Verb("show versions, devices and what is wrong with this machine", "maxtext doctor"),
}

COMMON = (
    "FILE is a YAML file or the name of a shipped preset; key=value words override it (any key of base.yml).\n"
    "--debug shows the full traceback of an error.\n"
)


def help_text() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {name:{width}}  {verb.summary}" for name, verb in VERBS.items()]
    return (
        "usage: maxtext VERB [FILE] [key=value ...]\n\nTraining and inference of open language models in JAX.\n\n"
        + "\n".join(lines)
        + f"\n\n{COMMON}\nexample: {VERBS['config'].example}\n"
        "`maxtext VERB --help` tells more; `maxtext --version` prints the version.\n"
    )


def verb_help(name: str) -> str:
    verb = VERBS[name]
    options = f"\n{verb.details}" if verb.details else ""
    usage = f"usage: maxtext {name} {verb.usage}\n\n{verb.summary[0].upper()}{verb.summary[1:]}.\n"
    common = f"\n{COMMON}" if verb.settings else "\n"
    return f"{usage}{options}{common}\nexample: {verb.example}\n"


def main(argv: list[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"]
    with signals.interrupt_on_signals():
        try:
            return run(args)
        except BrokenPipeError:  # `maxtext config | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except KeyboardInterrupt as error:
            return interrupted(error)
        except Exception as error:
            # An interrupt inside an import comes out as whatever the import made of it.
            if (interrupt := signals.pending()) is not None:
                return interrupted(interrupt)
            return failed(error, debug)


def interrupted(error: KeyboardInterrupt) -> int:
    """The exit code of a command that a signal ended, after one line."""
    signals.consume()
    with contextlib.suppress(OSError):
        print("interrupted", file=sys.stderr)
    return leave(signals.exit_code_of(error))


def failed(error: Exception, debug: bool) -> int:
    """The exit code of a command that failed, after a sentence; an error that has none is raised
    again.
    """
    from maxtext.common.errors import UserError, lost_peer, out_of_memory

    told = error if isinstance(error, UserError) else out_of_memory(error)
    if told is None and in_company():
        told = lost_peer(error)
    if debug or told is None:
        leave(1, traceback.print_exc)
        raise error
    for line in str(told).splitlines():
        shown = line.encode(errors="backslashreplace").decode()  # bytes of argv that are not UTF-8
        print(f"maxtext: error: {shown}", file=sys.stderr)
    if told.details:
        print(told.details.rstrip(), file=sys.stderr)
    return leave(told.exit_code)


def in_company() -> bool:
    """Whether other processes wait for this one to leave."""
    from maxtext.common import processes

    return processes.world().count > 1


def leave(code: int, last_words: Callable[[], None] | None = None) -> int:
    """A verb that failed among several processes must not wait for them; see
    common/processes.py.
    """
    from maxtext.common import processes

    return processes.exit_process(code, last_words)


def run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return 0
    if args[0] == "--version":
        from importlib import metadata

        print(f"maxtext {metadata.version('maxtext')}")
        return 0
    name, rest = args[0], args[1:]
    if name not in VERBS:
        import difflib

        from maxtext.common.errors import ConfigError

        near = difflib.get_close_matches(name, VERBS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the verbs are {', '.join(VERBS)}"
        raise ConfigError(f"unknown verb {name!r}; {hint}")
    if any(arg in ("-h", "--help") for arg in rest):
        print(verb_help(name), end="")
        return 0
    if name != "launch":  # whose options name images and the command of other machines
        from maxtext.cli.arguments import refuse_remote

        refuse_remote(
            rest[:2] if name == "tokenizer" and rest[:1] == ["inspect"] else rest
        )  # what follows is a text
    with progress.working(f"maxtext {name} is starting"):  # the imports take seconds
        return importlib.import_module(f"maxtext.cli.{name}").run(rest)


if __name__ == "__main__":
    raise SystemExit(main())
