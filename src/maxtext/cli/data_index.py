"""`maxtext data index`: writes the index of tokenized .npy files for dataset_type=olmo_grain."""

from maxtext.cli import arguments
from maxtext.cli.data import take_number
from maxtext.common.errors import ConfigError
from maxtext.common.files import local_path


def run(args: list[str]) -> int:
    from maxtext.input_pipeline.formats import find_files
    from maxtext.input_pipeline.olmo_index import write_index

    out = arguments.take_value(args, "--out")
    length = take_number(args, "--length", least=2)
    dtype = arguments.take_value(args, "--dtype") or "uint32"
    if out is None or length is None or not args or any(arg.startswith("-") for arg in args):
        raise ConfigError(
            "usage: maxtext data index --out INDEX.json --length N [--dtype uint32] FILES ..."
        )
    if local_path(out).exists():
        raise ConfigError(f"{out} exists already: remove it first, or choose another --out")
    index = write_index(out, find_files("FILES", ",".join(args)), length, dtype)
    print(
        f"wrote {out}: {len(index.shards):,} files, {index.tokens:,} tokens, {index.instances:,} "
        f"rows of {length:,}"
    )
    print(
        f"train on it with\ndataset_type=olmo_grain olmo_index_path={out} "
        f"max_target_length={length}"
    )
    return 0
