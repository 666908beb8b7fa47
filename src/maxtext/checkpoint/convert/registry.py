"""Which table a Hugging Face folder or a configuration of ours goes by."""

import re
from collections.abc import Iterable

from maxtext.checkpoint.convert.faithful import unsaid
from maxtext.checkpoint.convert.families import deepseek, gemma, llama, others, qwen
from maxtext.checkpoint.convert.families.defaults import DEFAULTS
from maxtext.checkpoint.convert.families.table import Json, Table
from maxtext.checkpoint.convert.quantized import scheme_of
from maxtext.common.errors import ConfigError, UserError
from maxtext.configs.derive import Devices
from maxtext.configs.load import load
from maxtext.configs.provenance import Layer, Setting, Source
from maxtext.configs.sources import from_python
from maxtext.configs.types import MaxTextConfig

TABLES: tuple[Table, ...] = (
    *llama.TABLES,
    *gemma.TABLES,
    *qwen.TABLES,
    *deepseek.TABLES,
    *others.TABLES,
)

# How folders with images, or of a bare model without its head, name what we know by the second.
PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
# Parts of such folders that are no part of the text model.
OTHER_PARTS = (
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|audio_tower|embed_vision|embed_audio)\..*",
)


def table_of(hf: Json, place: str) -> Table:
    """The table of a config.json."""
    named = hf.get("architectures") or []
    for table in TABLES:
        if any(name in table.architectures for name in named):
            return table
    kind = hf.get("model_type")
    if not named:
        for table in TABLES:
            if kind in (table.model_type, table.model_type.removesuffix("_text")):
                return table
    known = ", ".join(table.architectures[0] for table in TABLES)
    raise UserError(
        f"{place}: the architecture {', '.join(named) or kind} is not known; these are: {known}"
    )


def table_for(config: MaxTextConfig) -> Table:
    """The table by which a model of ours is written."""
    block = config.decoder_block.value
    for table in TABLES:
        if table.block == block and table.suits(config):
            return table
    known = ", ".join(sorted({table.block for table in TABLES}))
    raise UserError(f"decoder_block={block} has no Hugging Face architecture; these have: {known}")


def model_layer(hf: Json, place: str) -> Layer:
    """A config.json as the settings that a model's file would make."""
    table = table_of(hf, place)
    text = hf if hf.get("text_config") is None else hf["text_config"]
    scheme_of(hf, place)  # refuses what cannot be read
    if "tie_word_embeddings" in hf and text is not hf:
        text = {"tie_word_embeddings": hf["tie_word_embeddings"]} | text
    try:
        reading = table.read(DEFAULTS[table.model_type] | text)
    except KeyError as error:
        raise UserError(
            f"{place}: {error.args[0]} is missing, and {table.architectures[0]} needs it"
        ) from error
    source = Source("model", place)
    layer = {key: Setting(value, source) for key, value in reading.keys.items()}
    facts = {name: value for name, value in reading.facts.items() if value is not None}
    if facts:
        layer["architecture"] = Setting(facts, source)
    return layer


def check_model(layer: Layer, place: str) -> None:
    """Raise ConfigError, naming the config.json, for a combination of its entries that no model can
    have.
    """
    learned = layer.get("trainable_position_size")
    keys = {"max_target_length": learned.value} if learned is not None else {}
    try:
        load(None, from_python(keys), environ={}, devices=Devices(1), model=layer)
    except ConfigError as error:
        raise ConfigError(
            *(
                f"{place} describes a model that cannot be built: {problem}"
                for problem in error.problems
            )
        ) from error


def canonical(names: Iterable[str], table: Table) -> dict[str, str]:
    """The names that rules know -> the names in a folder."""
    renamed, names = {}, list(names)
    bare = not any(name.startswith(("model.", "transformer.", "language_model.")) for name in names)
    base = "transformer." if table.model_type == "gpt2" else "model."
    for name in names:
        known = next(
            (new + name[len(old) :] for old, new in PREFIXES.items() if name.startswith(old)), name
        )
        if bare and not known.startswith("lm_head."):
            known = base + known
        renamed[known] = name
    return renamed


def refuse_other_parts(names: Iterable[str]) -> None:
    """Raise ConfigError if tensors of these names are vision or audio parts, which are read from no
    folder.
    """
    parts = sorted(
        name for name in names if any(re.fullmatch(pattern, name) for pattern in OTHER_PARTS)
    )
    if parts:
        raise ConfigError(
            f"the folder that the weights came from had {len(parts)} vision or audio tensors, such as {parts[0]}, "
            "which would be lost: pass text_only=True (--text-only on the command line) to write the text model alone"
        )


def ignored(table: Table, config: MaxTextConfig) -> tuple[str, ...]:
    """Tensors that may be in a folder and are no weights of ours, as regular expressions."""
    tied = (r"lm_head\.weight",) if config.logits_via_embedding else ()
    return (*table.ignored, *table.ignored_in(config), *OTHER_PARTS, *tied)


def their_config(config: MaxTextConfig, dtype: str) -> Json:
    """A config.json for a model of ours; an error if it could not say all of it."""
    table = table_for(config)
    written = {
        "architectures": [table.architectures[0]],
        "model_type": table.model_type,
        "dtype": dtype,
        **table.write(
            config
        ),  # null says what an absent entry would not: none of what transformers takes by default
    }
    words = from_python({"max_target_length": config.max_target_length})
    again = load(
        None, words, environ={}, devices=Devices(1), model=model_layer(written, "config.json")
    )
    left = unsaid(config, again)
    if left:
        raise UserError(f"a config.json of {table.architectures[0]} cannot say: {', '.join(left)}")
    return written
