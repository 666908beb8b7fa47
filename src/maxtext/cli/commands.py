"""The commands of `maxtext`: summary, example, tasks, and the arguments that they take. Their
options are rows of options.py.
"""

from maxtext.cli import options
from maxtext.cli.arguments import Command, Form
from maxtext.cli.vllm_flags import VLLM

LOCAL_MODEL = """\
MODEL  a Hugging Face folder, org/name of the Hugging Face Hub, a converted checkpoint, or the
       folder of a training run
"""
MODEL = """\
MODEL  a Hugging Face folder, org/name of the Hugging Face Hub, a converted checkpoint, or the
       folder of a run (load_parameters_path=MODEL); or a named model, with random weights
"""
DATA = """\
DATA   files, folders or globs, whose names give their format, such as .jsonl, .parquet or .txt; or
       org/name of a dataset of the Hub
"""
TRAINING_ARGS = "[FILE] [MODEL] [DATA ...] [key=value ...]"
# Methods of training are `maxtext train` with the preset of the command's name.
FINE_TUNING = f"""\
{MODEL}{DATA}\
lora_rank=R  train adapters of rank R instead of the weights
FILE  default: the preset with the name of the command
"""


def method(rows: str = FINE_TUNING, args: str = TRAINING_ARGS) -> dict[str, Form]:
    return {"": Form(args, (options.FORCE,), rows=rows, module="train")}


COMMANDS = {
    "train": Command("train a model", "maxtext train quickstart", method(MODEL + DATA)),
    "sft": Command(
        "fine-tune a model on conversations or on prompts and completions",
        "maxtext sft ~/models/Qwen3-0.6B chats.jsonl lora_rank=16 steps=500",
        method(),
    ),
    "dpo": Command(
        "train a model on pairs of a preferred and a rejected completion",
        "maxtext dpo ~/models/Qwen3-0.6B pairs.jsonl steps=500",
        method(),
    ),
    "orpo": Command(
        "train on preferred and rejected completions by ORPO, without a reference model",
        "maxtext orpo ~/models/Qwen3-0.6B pairs.jsonl steps=500",
        method(),
    ),
    "reward": Command(
        "train a reward model on pairs of a preferred and a rejected completion",
        "maxtext reward ~/models/Qwen3-0.6B pairs.jsonl steps=500",
        method(),
    ),
    "distill": Command(
        "train a student on the outputs of a teacher",
        "maxtext distill ~/models/Qwen3-0.6B ~/models/Qwen3-8B texts.jsonl",
        method(
            """\
STUDENT  the student's folder (load_parameters_path)
TEACHER  the teacher, with the same tokenizer (teacher_overrides.load_parameters_path)
DATA  files, folders or globs, as in `maxtext sft`
teacher_overrides.KEY=VALUE  any other key, for the teacher only
distill_alpha=A  weight of the teacher's logits, 0 to 1
distill_temperature=T  temperature of both softmaxes
use_gkd=true  train on completions that the student samples
offline_data_dir=DIR  precomputed logits, instead of a teacher
FILE  default: the preset distill
""",
            "[FILE] [STUDENT] [TEACHER] [DATA ...] [key=value ...]",
        ),
    ),
    "grpo": Command(
        "train a model by reinforcement learning on rewards of sampled completions",
        "maxtext grpo ~/models/Qwen3-0.6B problems.jsonl num_batches=200",
        method(
            FINE_TUNING
            + """\
num_generations=G  completions per prompt
loss_algo=gspo-token  ratios per sequence instead of per token
"""
        ),
    ),
    "evaluate": Command(
        "sample responses to problems, and report how many are correct",
        "maxtext evaluate ~/models/Qwen3-0.6B problems.jsonl num_eval_passes=8",
        {
            "": Form(
                TRAINING_ARGS,
                options.EVALUATE,
                rows=f"""\
{MODEL}\
DATA  files of problems (grain_eval_files=FILES)
num_eval_passes=K  responses to each problem; pass@k for k = 1, 2, 4 … up to K
eval_sampling_strategy=NAME  greedy, standard, liberal or an entry of generation_configs
eval_mode=pass|maj|pass_at_1  whether any response is correct, whether the most frequent one
           is, or the share of correct ones
eval_make_lst=true  write the problems with incorrect answers to evaluation.jsonl
FILE  default: the preset evaluate; the file of a grpo run also works
""",
            )
        },
    ),
    "distill-logits": Command(
        "write a teacher's largest logits for training data, to distill from later",
        "maxtext distill-logits --top-k 128 logits ~/models/Qwen3-8B texts.jsonl",
        {
            "": Form(
                f"OUT {TRAINING_ARGS}",
                options.DISTILL_LOGITS,
                rows="""\
OUT  a new folder, or one to continue
MODEL, DATA  the teacher and the training data, as in `maxtext sft`
steps=N  batches to write; fewer if the data ends
""",
                module="train",
            )
        },
    ),
    "launch": Command(
        "train with several processes on this machine, or write job files for a cluster",
        "maxtext launch --local 2 --restarts 3 -- train quickstart",
        {
            "": Form(
                "-- train ...",
                options.LAUNCH,
                rows="elastic_enabled=true  with --local: continue with fewer processes when one "
                "is lost",
            )
        },
        takes_file=False,
    ),
    "decode": Command(
        "complete a prompt and stream the text",
        'maxtext decode ~/models/Qwen3-0.6B prompt="I love to"',
        {
            "": Form(
                "[FILE] [MODEL] [key=value ...]",
                (options.ADAPTER,),
                rows=f"""\
{LOCAL_MODEL}\
prompt=TEXT  the text to continue; with use_chat_template=true, a user message
max_target_length=N  tokens of prompt and completion together
decode_sampling_strategy=NAME  greedy, weighted, topk, nucleus or composite
multi_sampling=true  per_device_batch_size completions
return_log_prob=true  print the log-probability of each token
""",
            )
        },
    ),
    "chat": Command(
        "chat with a model, or with a server",
        "maxtext chat ~/models/Qwen3-0.6B decode_sampling_strategy=weighted",
        {
            "": Form(
                "[MODEL] [key=value ...]",
                options.CHAT,
                rows=f"""\
{LOCAL_MODEL}\
key=value  any key of base.yml, such as max_target_length, decode_sampling_strategy or
           chat_template_path; with --server, fields of each request, such as temperature=0.7 or
           max_tokens=500
/help  in the chat: lists its commands; Ctrl-C stops a reply
""",
            )
        },
        takes_file=False,
    ),
    "batch": Command(
        "run a file of generation requests; an interrupted job resumes",
        "maxtext batch ~/models/Qwen3-0.6B questions.jsonl answers.jsonl",
        {
            "": Form(
                "MODEL IN.jsonl OUT.jsonl [key=value ...]",
                options.BATCH,
                rows=f"""\
{LOCAL_MODEL}\
IN.jsonl  one request per line: {{"prompt": "I love to"}} or {{"messages": [...]}}, optionally with
          id, adapter (a name; empty: the base), and sampling options such as max_new_tokens, stop,
          seed, temperature, top_k and top_p
OUT.jsonl  one completion per line, in the order in which they finish:
           {{"index": 0, "text": "...", "finished": "end", ...}}
key=value  any key of base.yml
""",
            )
        },
        takes_file=False,
    ),
    "serve": Command(
        "serve a model over HTTP, with OpenAI's API",
        "maxtext serve ~/models/Qwen3-0.6B --port 8000 per_device_batch_size=16",
        {
            "": Form(
                "MODEL [key=value ...]",
                (*options.SERVE, *VLLM),
                rows=f"""\
{LOCAL_MODEL}\
key=value  any key of base.yml; each device runs per_device_batch_size sequences at a time, each of
           up to max_target_length tokens
--max-model-len N, ...  vLLM's flags set the corresponding keys, here max_target_length; a flag
           without an equivalent is refused with a hint
""",
            )
        },
        takes_file=False,
    ),
    "eval": Command(
        "evaluate a model: perplexity, lm-eval's tasks, system benchmarks",
        "maxtext eval ~/models/Qwen3-0.6B --tasks arc_easy,hellaswag --json scores.json",
        {
            "": Form(
                "MODEL [FILE ...] [key=value ...]",
                options.EVAL,
                rows=f"""\
{LOCAL_MODEL}\
FILE  for perplexity: text files, or JSON lines or Parquet with a column text
key=value  any key of base.yml, such as max_target_length
""",
            )
        },
        takes_file=False,
    ),
    "bench": Command(
        "measure the speed of prefill and decode, or a server's latency under load",
        "maxtext bench inference model_name=qwen3-0.6b per_device_batch_size=4\n"
        "         maxtext bench serve --streams 64 --prompt-tokens 64-1024 --plot load.png",
        {
            "inference": Form(
                "[FILE] [MODEL] [key=value ...]",
                help="measure a model on this machine",
                rows=f"""\
{MODEL}\
per_device_batch_size=N  batch sizes 1, 2, 4 … N per device
inference_microbenchmark_prefill_lengths=64,1024  prompt lengths
inference_microbenchmark_stages=prefill,generate  stages to measure
inference_microbenchmark_log_file_path=FILE  write the results as JSON
multi_sampling=true  also sample one prompt several times
""",
            ),
            "serve": Form(
                "",
                options.BENCH_SERVE,
                help="send requests to a server with OpenAI's API",
                module="bench_serve",
            ),
        },
    ),
    "convert": Command(
        "convert checkpoints from and to Hugging Face, or extract trained weights",
        "maxtext convert from_hf ~/models/Qwen3-0.6B qwen3",
        {
            "from_hf": Form(
                "DIR OUT",
                options.CONVERT,
                help="convert a Hugging Face folder of a supported family to native weights by "
                "layer, with config.yml and the tokenizer",
            ),
            "to_hf": Form(
                "CHECKPOINT OUT",
                options.TO_HF,
                help="convert a checkpoint to a Hugging Face folder, with its tokenizer",
            ),
            "params-only": Form(
                "CHECKPOINT OUT",
                options.CONVERT,
                help="extract the newest weights of a training checkpoint (a run's folder, its "
                "checkpoints, or one step), without the optimizer state, with config.yml",
            ),
            "merge-adapter": Form(
                "BASE ADAPTER OUT",
                help="merge a PEFT adapter into its base; OUT is a folder of the same kind as BASE",
            ),
        },
        takes_file=False,
    ),
    "config": Command(
        "show the resolved configuration and the source of each value, or explain a key",
        "maxtext config model_name=llama3.1-8b --changed",
        {
            "": Form(TRAINING_ARGS, options.CONFIG),
            "explain": Form(
                "KEY [FILE] [MODEL] [key=value ...]",
                help="show a key's meaning, type, bounds, needs, default, value and source, and "
                "whether it acts",
            ),
            "status": Form("", help="list which keys act, which do not, and why"),
        },
    ),
    "inspect": Command(
        "show the contents of a checkpoint and verify its files",
        "maxtext inspect maxtext_output/my_run --verify",
        {
            "": Form(
                "DIR",
                options.INSPECT,
                rows="DIR  a run's folder, its checkpoints, one step, a folder of safetensors, or "
                "a PEFT adapter",
            )
        },
        takes_file=False,
    ),
    "data": Command(
        "show batches, tokenize or index data, or measure the input pipeline",
        "maxtext data inspect quickstart --batches 20 --rows 2",
        {
            "inspect": Form(
                TRAINING_ARGS,
                options.DATA_INSPECT,
                help="show decoded batches, bad records and packing efficiency; needs no device. "
                "Each segment has its own colour; in fine-tuning, the tokens that are trained on "
                "are green",
                module="data_inspect",
            ),
            "prepare": Form(
                TRAINING_ARGS,
                options.DATA_PREPARE,
                help="tokenize the training documents into ArrayRecord files; an interrupted run "
                "resumes",
            ),
            "throughput": Form(
                TRAINING_ARGS,
                help="load `steps` batches as training would, and report the speed",
            ),
            "index": Form(
                "FILES ...",
                options.DATA_INDEX,
                help="write the index of tokenized .npy files for dataset_type=olmo_grain",
            ),
        },
    ),
    "tokenizer": Command(
        "train a tokenizer on local files, or inspect one",
        'maxtext tokenizer inspect byte "Grüße"',
        {
            "train": Form(
                "FILES ...",
                options.TOKENIZER_TRAIN,
                help="train a tokenizer",
                rows="FILES  text, jsonl (also .gz), parquet, arrow, tfrecord or arrayrecord "
                "files, folders or globs",
            ),
            "inspect": Form(
                "PATH [TEXT ...]",
                (options.JSON,),
                help="show the kind and the special tokens of a tokenizer, and how it splits TEXT",
                rows="PATH  a file, a folder, byte, or org/name of the Hugging Face Hub",
                ends_with_text=True,
            ),
        },
        takes_file=False,
    ),
    "models": Command(
        "list the named models with their sizes, or show one in detail",
        "maxtext models qwen3-30b-a3b",
        {"": Form("[NAME]")},
        takes_file=False,
    ),
    "estimate": Command(
        "estimate whether a training step fits on a target, and suggest better settings",
        "maxtext estimate model_name=llama2-7b --target v5p:4x4x4 --no-compile",
        {"": Form(TRAINING_ARGS, options.ESTIMATE)},
    ),
    "compile": Command(
        "compile the train step ahead of time (AOT), for this machine or a TPU slice",
        "maxtext compile quickstart compiled_trainstep_file=step.bin",
        {
            "": Form(
                TRAINING_ARGS,
                rows="""\
compiled_trainstep_file=FILE  the file to write; `maxtext train` loads it with the same key
compile_topology=v5p-128  the target; default: this machine
compile_topology_num_slices=1  number of slices of the target
""",
            )
        },
    ),
    "completion": Command(
        "print a script that lets a shell complete commands, options, keys and names",
        "maxtext completion bash >> ~/.bashrc",
        {
            **{shell: Form("") for shell in ("bash", "zsh", "fish")},
            "candidates": Form(
                "[ARG ...]", help="print the completions of the last argument", ends_with_text=True
            ),
        },
        takes_file=False,
    ),
    "doctor": Command("show versions, devices and problems of this machine", "maxtext doctor"),
}
