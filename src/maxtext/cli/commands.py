"""The commands of `maxtext`: summary, usage, options and an example of each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    summary: str
    example: str
    usage: str = ""  # default: a FILE and key=value arguments
    options: str = ""
    settings: bool = True  # takes a FILE and key=value arguments


MODEL = """\
MODEL                       a Hugging Face folder or org/name of its Hub, a converted checkpoint, or
                            a run (load_parameters_path=MODEL)
DATA                        files, folders or globs, whose format follows from their names, such as
                            .jsonl, .parquet or .txt; or org/name of a dataset of the Hub
"""
FINE_TUNING_OPTIONS = (
    MODEL
    + """\
lora_rank=R                 train adapters of rank R instead of the weights
--force                     start although the memory seems too small
FILE                        default: the preset of the command's name"""
)

COMMANDS = {
    "train": Command(
        usage="maxtext train [FILE] [MODEL] [DATA ...] [key=value ...]",
        summary="train a model",
        example="maxtext train quickstart",
        options=MODEL + "--force                     start although the memory seems too small",
    ),
    "sft": Command(
        usage="maxtext sft [FILE] [MODEL] [DATA ...] [key=value ...]",
        summary="fine-tune a model on conversations or on prompts and completions",
        example="maxtext sft ~/models/Qwen3-0.6B chats.jsonl lora_rank=16 steps=500",
        options=FINE_TUNING_OPTIONS,
    ),
    "dpo": Command(
        usage="maxtext dpo [FILE] [MODEL] [DATA ...] [key=value ...]",
        summary="train a model on pairs of a preferred and a rejected completion",
        example="maxtext dpo ~/models/Qwen3-0.6B pairs.jsonl steps=500",
        options=FINE_TUNING_OPTIONS,
    ),
    "orpo": Command(
        usage="maxtext orpo [FILE] [MODEL] [DATA ...] [key=value ...]",
        summary="the same by ORPO, without a reference model",
        example="maxtext orpo ~/models/Qwen3-0.6B pairs.jsonl steps=500",
        options=FINE_TUNING_OPTIONS,
    ),
    "distill": Command(
        summary="train a student on the outputs of a teacher",
        example="maxtext distill ~/models/Qwen3-0.6B ~/models/Qwen3-8B texts.jsonl",
        usage="maxtext distill [FILE] [STUDENT] [TEACHER] [DATA ...] [key=value ...]",
        options="""\
STUDENT                                       its folder (load_parameters_path)
TEACHER                                       the teacher, with the same tokenizer
                                              (teacher_overrides.load_parameters_path)
DATA                                          files, folders or globs, as in `maxtext sft`
teacher_overrides.KEY=VALUE                   any other key of the teacher alone
distill_alpha=A                               weight of the teacher's logits, 0 to 1
distill_temperature=T                         of both softmaxes
use_gkd=true                                  learn from completions that the student samples
offline_data_dir=DIR                          instead of a teacher: its logits, written before
--force                                       start although the memory seems too small
FILE                                          default: the preset distill""",
    ),
    "grpo": Command(
        usage="maxtext grpo [FILE] [MODEL] [DATA ...] [key=value ...]",
        summary="train a model on rewards of completions that it samples",
        example="maxtext grpo ~/models/Qwen3-0.6B problems.jsonl num_batches=200",
        options=FINE_TUNING_OPTIONS
        + """
num_generations=G           completions of each prompt
loss_algo=gspo-token        ratios of sequences instead of tokens""",
    ),
    "evaluate": Command(
        summary="sample responses to problems, and report how many are right",
        example="maxtext evaluate ~/models/Qwen3-0.6B problems.jsonl num_eval_passes=8",
        usage="maxtext evaluate [FILE] [MODEL] [DATA ...] [key=value ...] [--adapter DIR] [--json]",
        options="""\
MODEL                          a Hugging Face folder or org/name of its Hub, a converted
                               checkpoint, or a run (load_parameters_path=MODEL)
DATA                           files of problems (grain_eval_files=FILES)
num_eval_passes=K              responses to each problem; pass@k for k = 1, 2, 4 … up to K
eval_sampling_strategy=NAME    greedy, standard, liberal or an entry of generation_configs
eval_mode=pass|maj|pass_at_1   any response is right, the most frequent one is, or the share
eval_make_lst=true             write the problems that are answered wrong to evaluation.jsonl
--adapter DIR                  a PEFT adapter of the model
--json                         machine-readable output
FILE                           default: the preset evaluate; that of a grpo run is one, too""",
    ),
    "distill-logits": Command(
        summary="write the largest logits of a teacher over training data, to distill from later",
        example="maxtext distill-logits --top-k 128 logits ~/models/Qwen3-8B texts.jsonl",
        usage="maxtext distill-logits --top-k K OUT [FILE] [MODEL] [DATA ...] [key=value ...]",
        options="""\
--top-k K                   logits of each token
OUT                         a new folder, or one to continue
MODEL, DATA                 the teacher and the training data, as in `maxtext sft`
steps=N                     batches to write; fewer if the data ends""",
    ),
    "launch": Command(
        summary="train with several processes on this machine, or write job files for a cluster",
        example="maxtext launch --local 2 --restarts 3 -- train quickstart",
        usage="""\
maxtext launch --local N [--restarts K] [--devices-per-process D] [--cpu] [--grace S] -- train ...
maxtext launch --print k8s|slurm [--nodes N] [--gpus-per-node G] [--name NAME] ... -- train ...""",
        options="""\
--local N                  number of processes; if one fails, all are stopped
--restarts K               restart all from the last checkpoint, at most K times
--devices-per-process D    GPUs of each process (default: all, divided evenly);
                           on CPUs, the number of simulated devices
--cpu                      do not use accelerators
--grace S                  seconds for a last checkpoint when the run is stopped
                           (60; on clusters 120)
--print k8s                print a Kubernetes JobSet; also takes
                           --tpu-topology v5p:4x4x4 --slices S --image IMAGE
                           --volume CLAIM
--print slurm              print a Slurm batch script; also takes --time 24:00:00
elastic_enabled=true       with --local: continue with fewer processes after losing one""",
        settings=False,
    ),
    "decode": Command(
        summary="complete a prompt and stream the text",
        example='maxtext decode ~/models/Qwen3-0.6B prompt="I love to"',
        usage="maxtext decode [FILE] [MODEL] [key=value ...] [--adapter DIR]",
        options="""\
MODEL                             a Hugging Face folder or org/name of its Hub, a converted
                                  checkpoint, or a training run
prompt=TEXT                       with use_chat_template=true, a user message
max_target_length=N               length of prompt and completion, in tokens
decode_sampling_strategy=NAME     greedy, weighted, topk, nucleus or composite
--adapter DIR                     a PEFT adapter of the model
multi_sampling=true               per_device_batch_size completions
return_log_prob=true              print the log probability of each token""",
    ),
    "chat": Command(
        summary="chat with a model, or with a server",
        example="maxtext chat ~/models/Qwen3-0.6B decode_sampling_strategy=weighted",
        usage="""\
maxtext chat MODEL [--adapter DIR] [key=value ...]
maxtext chat --server URL [--api-key KEY] [--model NAME] [field=value ...]""",
        options="""\
MODEL           a Hugging Face folder or org/name of its Hub, a converted checkpoint, or a
                training run
--adapter DIR   a PEFT adapter of the model
key=value       any key of base.yml, such as max_target_length, decode_sampling_strategy,
                chat_template_path
--server URL    a server with OpenAI's API, such as http://127.0.0.1:8000
--api-key KEY   its key (MAXTEXT_API_KEY)
--model NAME    one of its models (the first)
field=value     fields of its requests, such as temperature=0.7 or max_tokens=500
/help           inside the chat, lists the commands; Ctrl-C stops a reply""",
        settings=False,
    ),
    "batch": Command(
        summary="run a file of generation requests; an interrupted job resumes",
        example="maxtext batch ~/models/Qwen3-0.6B questions.jsonl answers.jsonl",
        usage="maxtext batch MODEL IN.jsonl OUT.jsonl [--adapter DIR] [--overwrite] "
        "[key=value ...]",
        options="""\
MODEL           a Hugging Face folder or org/name of its Hub, a converted checkpoint, or a
                training run (also --model MODEL)
IN.jsonl        one request per line: {"prompt": "I love to"} or {"messages": [...]},
                optionally with id, seed, stop, max_new_tokens, temperature, top_k, top_p,
                adapter (a name; empty: the base)
OUT.jsonl       one completion per line, in the order in which they finish:
                {"index": 0, "text": "...", "finished": "end", ...}
--adapter DIR   a PEFT adapter of the model, or a folder of adapters
--overwrite     discard an existing OUT.jsonl
key=value       any key of base.yml""",
        settings=False,
    ),
    "serve": Command(
        summary="serve a model over HTTP, with OpenAI's API",
        example="maxtext serve ~/models/Qwen3-0.6B --port 8000 per_device_batch_size=16",
        usage="maxtext serve MODEL [flags] [key=value ...]",
        options="""\
MODEL                        a Hugging Face folder or org/name of its Hub, a converted checkpoint,
                             or a training run
--host HOST, --port PORT     address (127.0.0.1, 8000); port 0 takes a free one
--uds PATH                   a unix socket instead
--served-model-name NAME ... names that requests may use (the name of MODEL)
--adapter DIR                a PEFT adapter (a folder, or org/name of the Hub), or a folder of
                             adapters: each is a model of its name
--api-key KEY ...            keys, one of which a request needs (MAXTEXT_API_KEY)
--allowed-hosts NAME ...     names of the server in addresses, besides localhost, IP addresses and
                             --host; .NAME: and its subdomains; *: any
--cors ORIGIN ...            pages of other origins that may use the server from a browser (none)
--max-queue N                requests that may wait for a slot (1024)
--request-timeout S          seconds from arrival to the last token (600); 0: no limit
--drain-timeout S            seconds for running requests after SIGTERM (30)
--max-body BYTES             of a request (4 MiB)
--max-logprobs N             most of logprobs and top_logprobs (20)
--ssl-certfile F, --ssl-keyfile F, --ssl-ca-certs F
                             TLS
--root-path P                the prefix that a proxy strips
--default-chat-template-kwargs JSON
                             variables of the chat template, such as {"enable_thinking": false}
--generation-config auto|none|vllm
                             whether generation_config.json has sampling defaults (vllm: none)
--tool-call-parser hermes|llama3_json|mistral|qwen3_coder|gpt_oss|none
                             form of calls in the text (by the chat template)
--reasoning-parser think|gpt_oss|none
                             form of reasoning in the text (by the chat template)
--metrics-prefix maxtext|vllm
                             of the names of metrics
--protect-metrics            /metrics needs a key, too
--strict-fields              unknown fields of a request are errors
--lora NAME=DIR ...          adapters by name, instead of --adapter
--allow-lora-updates, --lora-root DIR
                             let requests load adapters below DIR, and drop adapters
--no-tools                   tools in a request are errors
--log-requests               log a line for each request, without its text
--log-prompts                log the prompts, too
--no-page                    no chat page at /
--max-model-len N, --tensor-parallel-size N, --dtype D, --tokenizer PATH ...
                             flags of vLLM stand for keys, such as max_target_length; one without a
                             meaning here is refused with the key to use
key=value                    any key of base.yml; per_device_batch_size requests run at a time,
                             with max_target_length tokens each""",
        settings=False,
    ),
    "eval": Command(
        summary="evaluate a model: perplexity, lm-eval's tasks, benchmarks of the system",
        example="maxtext eval ~/models/Qwen3-0.6B --tasks arc_easy,hellaswag --json scores.json",
        usage="""\
maxtext eval MODEL FILE ... [--window N] [--stride N] [--json OUT] [key=value ...]
maxtext eval MODEL --tasks A,B [--include-path FOLDER] [--num-fewshot N] [--limit N]
             [--apply-chat-template] [--json OUT] [key=value ...]
maxtext eval MODEL --builtin NAME,... [--limit N] [--seed N] [--apply-chat-template]
             [--json OUT] [key=value ...]""",
        options="""\
MODEL                   a Hugging Face folder or org/name of its Hub, a converted checkpoint, or a
                        training run
FILE                    texts, or JSON lines with a column text, for perplexity (also
                        --perplexity FILE)
--window N              tokens of a window (max_target_length)
--stride N              tokens between windows (--window); smaller: more context
--tasks A,B             tasks of lm-eval: names, groups, tags or patterns
--include-path FOLDER   of YAML files of further tasks
--num-fewshot N         examples before each question (the task's)
--limit N               questions of each task
--apply-chat-template   questions are messages of a chat
--builtin NAME,...      benchmarks that are generated by a seed; all: every one
--seed N                of these benchmarks (0)
--adapter DIR           a PEFT adapter of the model
--json OUT              write a report: scores with standard errors, versions, settings
key=value               any key of base.yml, such as max_target_length""",
        settings=False,
    ),
    "bench": Command(
        summary="measure the speed of prefill and decode, or the latencies of a server under load",
        example="maxtext bench inference model_name=qwen3-0.6b per_device_batch_size=4\n"
        "         maxtext bench serve --streams 64 --prompt-tokens 64-1024 --plot load.png",
        usage="""\
maxtext bench inference [FILE] [key=value ...]
maxtext bench serve [--url URL] [flags]""",
        options="""\
inference: the model and what to measure
load_parameters_path=DIR or model_name=NAME         the model; a name has random weights
per_device_batch_size=N                             batch sizes 1, 2, 4 … N per device
inference_microbenchmark_prefill_lengths=64,1024    prompt lengths
inference_microbenchmark_stages=prefill,generate    stages to measure
inference_microbenchmark_log_file_path=FILE         write the results as JSON
multi_sampling=true                                 also several samples of one prompt

serve: requests to a server with OpenAI's API
--url URL               default: http://127.0.0.1:8000
--api-key KEY           default: the environment variable MAXTEXT_API_KEY
--model NAME            default: the first of the server
--streams N             closed loop: N requests at a time; default: 16
--rate R                open loop: R requests a second, at random times; inf: all at once
--requests N            number of requests
--duration S            or the seconds in which they are sent; default: 30
--prompt-tokens A[-B]   length of prompts, uniformly distributed; default: 128
--new-tokens A[-B]      length of completions; default: 64
--seed N                of lengths, tokens and arrival times; default: 0
--timeout S             of a request; default: 600
--json OUT              write the numbers as JSON
--plot OUT.png          draw distributions and time lines""",
    ),
    "convert": Command(
        summary="convert checkpoints from and to Hugging Face, or extract trained weights",
        example="maxtext convert from_hf ~/models/Qwen3-0.6B qwen3",
        usage="""\
maxtext convert from_hf DIR OUT [--dtype float32|bfloat16|float16]
maxtext convert to_hf CHECKPOINT OUT [--dtype float32|bfloat16|float16] [--text-only]
maxtext convert params-only CHECKPOINT OUT [--dtype float32|bfloat16|float16]
maxtext convert merge-adapter BASE ADAPTER OUT""",
        options="""\
from_hf       safetensors, config.json and tokenizer of a supported family to native
              weights by layer, with config.yml
to_hf         a checkpoint to a Hugging Face folder, with the assets that came with it
params-only   the newest weights of a training checkpoint (a run's folder, its
              checkpoints, or one step) without the optimizer state, with config.yml
merge-adapter a PEFT adapter merged into its base, as a folder of the base's kind
--dtype       dtype of all floating-point weights; default: unchanged
--text-only   write only the text model of a checkpoint with vision or audio tensors""",
        settings=False,
    ),
    "config": Command(
        summary="show the resolved configuration and the source of each value, or explain a key",
        example="maxtext config model_name=llama3.1-8b --changed",
        usage="""\
maxtext config [FILE] [key=value ...] [--changed] [--format yaml|json]
maxtext config explain KEY [FILE] [key=value ...]
maxtext config status""",
        options="""\
--changed            only keys that differ from base.yml
--format yaml|json   machine-readable; the YAML can be used as a FILE
explain KEY          type, default, meaning, source, and whether the key acts
status               which keys act, which do not, and why""",
    ),
    "inspect": Command(
        summary="show the contents of a checkpoint and verify its files",
        example="maxtext inspect maxtext_output/my_run --verify",
        usage="maxtext inspect DIR [--verify] [--json]",
        options="""\
DIR        a run's folder, its checkpoints, one step, a folder of safetensors, or a PEFT
           adapter
--verify   read every file and compare it with the checksums written with it
--json     machine-readable output""",
        settings=False,
    ),
    "data": Command(
        summary="show batches, tokenize data before training, or measure the input pipeline",
        example="maxtext data inspect quickstart --batches 20 --rows 2",
        usage="""\
maxtext data inspect [FILE] [key=value ...] [--batches N] [--rows N] [--eval] [--json]
maxtext data prepare --out DIR [--workers N] [--shard-documents N] [FILE] [key=value ...]
maxtext data throughput [FILE] [key=value ...]""",
        options="""\
inspect      decoded batches, one colour per segment, or in fine-tuning one for learned
             tokens, and packing efficiency; needs no device
  --batches N          number of batches (1)
  --rows N             rows of each batch to show (4)
  --eval               evaluation data
  --json               machine-readable output
prepare      tokenize the training documents into ArrayRecord files; an interrupted run
             resumes
  --out DIR            a new or empty folder, or one to resume
  --workers N          processes (all cores)
  --shard-documents N  documents per file (by the size of the data)
throughput   load `steps` batches as training would, and report the speed""",
    ),
    "tokenizer": Command(
        summary="train a tokenizer on local files, or inspect one",
        example='maxtext tokenizer inspect byte "Grüße"',
        usage="""\
maxtext tokenizer train [--kind KIND] [--vocab-size N] [--column NAME] [--max-chars N]
                        --out PATH [--overwrite] FILES...
maxtext tokenizer inspect PATH [TEXT] [--json]""",
        options="""\
FILES            text, jsonl (also .gz), parquet, arrow, tfrecord or arrayrecord files,
                 folders or globs
--out PATH       a folder for bpe, a file.model for the other kinds
--kind KIND      bpe (byte level, tokenizer.json; the default), sentencepiece (unigram),
                 sentencepiece-bpe
--vocab-size N   number of ids, including special tokens (vocab_size=N)
--column NAME    text column of records (train_data_columns=NAME)
--max-chars N    characters of training text, sampled over all documents
                 (max_corpus_chars=N)
--overwrite      replace an existing PATH
inspect PATH     a file, a folder, byte, or a name on the Hugging Face hub
--json           machine-readable output""",
        settings=False,
    ),
    "models": Command(
        summary="list the named models with their sizes, or show one in detail",
        example="maxtext models qwen3-30b-a3b",
        usage="maxtext models [NAME]",
        settings=False,
    ),
    "estimate": Command(
        summary="estimate whether a training step fits on a target, and suggest better settings",
        example="maxtext estimate model_name=llama2-7b --target v5p:4x4x4 --no-compile",
        usage="""\
maxtext estimate [FILE] [key=value ...] [--target NAME] [--slices N] [--no-compile]
                 [--search] [--format json]""",
        options="""\
--target NAME   cpu, cpu:8, gpu, or a TPU slice such as v5p:4x4x4 or v5p-128;
                default: compile_topology, else this machine
--slices N      number of slices of a TPU target
--no-compile    estimate from shapes only
--search        also compile the suggestions, to confirm them
--format json   machine-readable output""",
    ),
    "compile": Command(
        summary="compile the train step ahead of time (AOT), for this machine or a TPU slice",
        example="maxtext compile quickstart compiled_trainstep_file=step.bin",
        options="""\
compiled_trainstep_file=FILE      output file; maxtext train loads it by the same key
compile_topology=v5p-128          the target; default: this machine
compile_topology_num_slices=1     number of slices of the target""",
    ),
    "completion": Command(
        summary="print a script with which a shell completes commands, options, keys and names",
        example="maxtext completion bash >> ~/.bashrc",
        usage="maxtext completion bash|zsh|fish",
        settings=False,
    ),
    "doctor": Command(
        summary="show versions, devices and problems of this machine",
        example="maxtext doctor",
    ),
}
