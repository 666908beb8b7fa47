"""Converts records to token ids: the column of the text, chats, special tokens, and columns of
token ids.

`prepare` extracts the text of one record; `encode` tokenizes many texts at once, on all cores.
"""

import json
from collections.abc import Sequence

import numpy as np

from maxtext.common.errors import ConfigError, UserError
from maxtext.common.types import Json
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.bad_records import BadRecordList
from maxtext.input_pipeline.encode_rows import TextEncoder
from maxtext.input_pipeline.formats import Record, UnusableRecord
from maxtext.input_pipeline.interface import Split
from maxtext.tokenizers import load_tokenizer
from maxtext.tokenizers.chat import chat_template


def data_columns(config: MaxTextConfig, split: Split) -> list[str]:
    key = f"{split.value}_data_columns"
    columns = list(getattr(config, key))
    most = 2 if config.use_chat_template else 1
    if not 1 <= len(columns) <= most or len(set(columns)) < len(columns):
        wanted = (
            "the messages, or those of prompt and completion"
            if config.use_chat_template
            else "the text"
        )
        raise ConfigError(f"{key}={columns}: name the column of {wanted}")
    return columns


class Encoder:
    bad_records: BadRecordList | None = None  # lists those of all streams, if it is set

    def __init__(self, config: MaxTextConfig, split: Split):
        self.columns = data_columns(config, split)
        self.vocab_size = config.vocab_size
        tokenize = config.tokenize_train_data if split is Split.TRAIN else config.tokenize_eval_data
        if config.use_chat_template and not tokenize:
            raise ConfigError(
                f"use_chat_template writes text, but tokenize_{split.value}_data=false reads tokens"
            )
        self.tokenizer = load_tokenizer(config) if tokenize else None
        self.template = (
            chat_template(config, self.tokenizer)
            if self.tokenizer and config.use_chat_template
            else None
        )
        self.before, self.after = np.zeros(0, np.int32), np.zeros(0, np.int32)
        if self.tokenizer and not self.template:  # a template writes its special tokens itself
            self.before = special(self.tokenizer.bos_id, config.add_bos)
            self.after = special(self.tokenizer.eos_id, config.add_eos)

    def position_fingerprint(self) -> dict[str, bool]:
        """Which special tokens are added to each document: they change how documents are packed."""
        return {"add_bos": len(self.before) > 0, "add_eos": len(self.after) > 0}

    def prepare(self, record: Record) -> str | np.ndarray:
        """The text of a record, or its tokens. Raises UnusableRecord if it has none."""
        values = [self.value(record, column) for column in self.columns]
        if self.tokenizer is None:
            return self.tokens(values[0])
        if self.template is not None:
            try:
                return self.template.render(self.messages(values))
            except UserError as error:
                raise UnusableRecord(str(error)) from error
        if not isinstance(values[0], str):
            raise UnusableRecord(
                f"column {self.columns[0]} has {describe(values[0])} instead of text"
            )
        return values[0]

    def encode(self, prepared: Sequence[str | np.ndarray]) -> list[np.ndarray]:
        """The token ids of prepared records, int32 [n] each. Empty texts are skipped."""
        if self.tokenizer is None:
            return [tokens for tokens in prepared if isinstance(tokens, np.ndarray)]
        texts = [text for text in prepared if isinstance(text, str) and text]
        encoded = self.tokenizer.encode_batch(texts, specials=self.template is not None)
        return [np.concatenate([self.before, ids, self.after]) for ids in encoded]

    def value(self, record: Record, column: str) -> object:
        if column not in record:
            raise UnusableRecord(
                f"there is no column {column}, only "
                f"{', '.join(map(str, record)) or 'an empty record'}"
            )
        return record[column]

    def tokens(self, value: object) -> np.ndarray:
        tokens = np.asarray(value) if isinstance(value, list | tuple | np.ndarray) else np.array("")
        if tokens.ndim == 1 and not tokens.size:
            return np.zeros(0, np.int32)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise UnusableRecord(
                f"column {self.columns[0]} has {describe(value)} instead of token ids"
            )
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            wrong = tokens.min() if tokens.min() < 0 else tokens.max()
            raise UnusableRecord(f"its token id {wrong} is outside vocab_size={self.vocab_size}")
        return tokens.astype(np.int32)

    def messages(self, values: list[object]) -> list[Json]:
        if len(values) == 2:
            prompt, completion = values
            return [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": completion},
            ]
        (value,) = values
        try:
            value = json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            raise UnusableRecord(
                f"column {self.columns[0]} is text that is not JSON: {error}"
            ) from error
        if not (
            isinstance(value, list)
            and all(isinstance(message, dict) and "role" in message for message in value)
        ):
            raise UnusableRecord(
                f"column {self.columns[0]} has {describe(value)} instead of a list of messages"
            )
        return value


RecordEncoder = Encoder | TextEncoder


def special(token: int | None, wanted: bool) -> np.ndarray:
    return np.array([token] if wanted and token is not None else [], np.int32)


def describe(value: object) -> str:
    return "nothing" if value is None else f"a value of type {type(value).__name__}"
