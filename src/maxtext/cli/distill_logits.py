"""`maxtext distill-logits`: writes the largest logits of a teacher, for offline_data_dir."""

import os

from maxtext.cli import positionals
from maxtext.cli.arguments import Arguments
from maxtext.cli.train import check_has_data, open_model_checkpoint
from maxtext.common.errors import ConfigError
from maxtext.common.files import local_path
from maxtext.configs import ledger, sources
from maxtext.configs.load import base_values, peek_setting
from maxtext.configs.provenance import Setting, Source
from maxtext.configs.startup import configure_process
from maxtext.models.configuration import load

USAGE = "maxtext distill-logits --top-k K OUT [FILE] [key=value ...]"


def run(arguments: Arguments) -> int:
    words = arguments.all_words
    if not words or "=" in words[0]:
        raise ConfigError(f"name a folder for the logits: {USAGE}")
    folder = local_path(words[0])
    path, overrides = positionals.split(words[1:])
    path = path or str(sources.HERE / "distill.yml")
    layer = sources.from_overrides(overrides)
    # A frozen model needs no weights wider than what it computes in.
    dtype = peek_setting("dtype", path, layer, os.environ) or base_values().dtype.value
    layer.setdefault("weight_dtype", Setting(dtype, Source("derived")))
    checkpoint = open_model_checkpoint(path, layer)
    config = load(path, layer, model=checkpoint.model_layer if checkpoint else None)
    ledger.refuse_unsupported_model(config, base_values())
    check_has_data(config)
    configure_process(config)
    from maxtext.trainers.methods.distillation.write_logits import write_logits

    num_parts, num_rows = write_logits(config, folder, arguments["--top-k"], checkpoint)
    wrote = f"wrote {num_rows} rows in {num_parts} parts to"
    print(f"{wrote if num_parts else 'nothing was missing in'} {folder}")
    print(f"train on it with\noffline_data_dir={folder}")
    return 0
