"""`maxtext convert`: converts checkpoints from and to Hugging Face, extracts the weights of
training checkpoints, and merges adapters.
"""

import shlex

from maxtext.cli.arguments import Arguments
from maxtext.cli.terminal import ProgressBar
from maxtext.common.files import local_path
from maxtext.common.hardware import format_bytes


def run(arguments: Arguments) -> int:
    if arguments.task == "merge-adapter":
        return merge_adapter(*arguments.args)
    from maxtext.checkpoint.convert.command import from_folder, from_training, to_folder
    from maxtext.checkpoint.safetensors_reader import HF_STEM, NATIVE_STEM

    direction, dtype = arguments.task, arguments["--dtype"]
    source, out = arguments.args
    with ProgressBar(f"{source} -> {out}") as progress:
        if direction == "to_hf":
            to_folder(source, out, dtype, progress, arguments["--text-only"])
        else:
            {"from_hf": from_folder, "params-only": from_training}[direction](
                source, out, dtype, progress
            )
    print(summary(out, HF_STEM if direction == "to_hf" else NATIVE_STEM))
    return 0


def merge_adapter(base: str, adapter: str, out: str) -> int:
    from maxtext.adapters.merge import merge_folder
    from maxtext.checkpoint.safetensors_reader import HF_STEM, NATIVE_STEM

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
