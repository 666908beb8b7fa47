"""`maxtext convert`: converts checkpoints from and to Hugging Face, extracts the weights of
training checkpoints, and merges adapters.
"""

import shlex

from maxtext.cli import arguments
from maxtext.cli.terminal import ProgressBar
from maxtext.common.errors import ConfigError
from maxtext.common.files import local_path
from maxtext.common.hardware import format_bytes

DTYPES = ("float32", "bfloat16", "float16")


def run(args: list[str]) -> int:
    dtype = arguments.take_option(args, "--dtype", DTYPES)
    text_only = arguments.take_flag(args, "--text-only")
    if args[:1] == ["merge-adapter"]:
        return merge_adapter(args[1:], dtype, text_only)
    if len(args) != 3 or args[0] not in ("from_hf", "to_hf", "params-only"):
        raise ConfigError(
            "give a direction and two folders: maxtext convert from_hf DIR OUT, to_hf CHECKPOINT "
            "OUT, or params-only CHECKPOINT OUT; or three: merge-adapter BASE ADAPTER OUT"
        )
    from maxtext.checkpoint.convert.command import from_folder, from_training, to_folder
    from maxtext.checkpoint.safetensors_reader import HF_STEM, NATIVE_STEM

    direction, source, out = args
    if text_only and direction != "to_hf":
        raise ConfigError(
            f"--text-only would do nothing in maxtext convert {direction}: it is for to_hf"
        )
    with ProgressBar(f"{source} -> {out}") as progress:
        if direction == "to_hf":
            to_folder(source, out, dtype, progress, text_only)
        else:
            {"from_hf": from_folder, "params-only": from_training}[direction](
                source, out, dtype, progress
            )
    print(summary(out, HF_STEM if direction == "to_hf" else NATIVE_STEM))
    return 0


def merge_adapter(args: list[str], dtype: str | None, text_only: bool) -> int:
    if len(args) != 3 or dtype or text_only:
        raise ConfigError(
            "give three folders and no option: maxtext convert merge-adapter BASE ADAPTER OUT"
        )
    from maxtext.adapters.merge import merge_folder
    from maxtext.checkpoint.safetensors_reader import HF_STEM, NATIVE_STEM

    base, adapter, out = args
    with ProgressBar(f"{base} + {adapter} -> {out}") as progress:
        merge_folder(base, adapter, out, progress)
    is_native = any(local_path(out).glob(f"{NATIVE_STEM}*"))
    print(summary(out, NATIVE_STEM if is_native else HF_STEM))
    return 0


def summary(out: str, stem: str) -> str:
    """The contents of a folder of weights, read from its headers, and a command that uses it."""
    from maxtext.checkpoint.open import HF_ASSETS_DIR
    from maxtext.checkpoint.safetensors_reader import (
        NATIVE_STEM,
        SafetensorsFolder,
        find_hf_assets,
    )
    from maxtext.tokenizers.load import tokenizer_files

    folder = local_path(out)
    tensors = SafetensorsFolder.open(folder, stem).tensors.values()
    dtypes = ", ".join(sorted({str(tensor.dtype) for tensor in tensors}))
    nbytes = sum(tensor.nbytes for tensor in tensors)
    command = f"maxtext decode {shlex.quote(out)} prompt='I love to'"
    assets = folder / HF_ASSETS_DIR if stem == NATIVE_STEM else folder
    if not (assets.is_dir() and tokenizer_files(find_hf_assets(assets))):
        command += " tokenizer_path=TOKENIZER (the tokenizer that it was trained with)"
    return (
        f"wrote {out}: {len(tensors):,} tensors, {dtypes}, {format_bytes(nbytes)}\ntry it with: "
        f"{command}"
    )
