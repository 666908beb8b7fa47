"""Rows for fine-tuning as token ids and masks of the tokens that are trained on.

A conversation is tokenized whole, by the chat template; its mask is that of the assistant's turns
(`tokenizers/assistant_mask.py`). Texts are tokenized with the special tokens that start a text in
the vocabulary, and end with the end token. Truncation keeps the start of a row; of a preference
pair it keeps the end of the prompt and the start of the completions.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from maxtext.common.errors import ConfigError, UserError
from maxtext.common.trees import common_prefix_length
from maxtext.common.types import Json
from maxtext.configs.sources import is_preset
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.bad_records import BadRecordList
from maxtext.input_pipeline.formats import Record, UnusableRecord
from maxtext.input_pipeline.formatting import FormattingFunction
from maxtext.input_pipeline.interface import MARGIN, Split
from maxtext.input_pipeline.prompt_templates import (
    DatasetProcessor,
    PromptTemplate,
    delimiter_texts,
)
from maxtext.input_pipeline.row_forms import (
    OPTIONAL,
    PAIR_FORMS,
    PROMPT_FORMS,
    ROW_FORMS,
    Conversation,
    Message,
    PreferenceChats,
    PreferenceTexts,
    PromptCompletion,
    Remark,
    RowReports,
    TextRow,
    has_form,
    no_form,
    parse_pair,
    parse_prompt,
    parse_row,
)
from maxtext.tokenizers import Tokenizer, load_tokenizer
from maxtext.tokenizers.assistant_mask import tokenize_chat
from maxtext.tokenizers.chat import ChatTemplate, chat_template

DROPPED = {Remark.NOT_TRAINED_ON, Remark.CUT_EQUAL}  # remarks on rows and pairs without a gradient


@dataclass(frozen=True)
class EncodedRow:
    """`ids` int32 [n], `mask` bool [n]: True for tokens that are trained on, except that the first
    token of a row is never predicted.
    """

    ids: np.ndarray
    mask: np.ndarray
    remarks: tuple[Remark, ...] = ()


@dataclass(frozen=True)
class EncodedPair:
    """Token ids, int32 [n] each. The completions follow the prompt."""

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray
    remarks: tuple[Remark, ...] = ()
    margin: float = 0.0


@dataclass(frozen=True)
class EncodedPrompt:
    """`ids` int32 [n]. `record`: the columns of the row, which reward functions read."""

    ids: np.ndarray
    record: Record
    remarks: tuple[Remark, ...] = ()


EncodedRecord = EncodedRow | EncodedPair | EncodedPrompt


def encode_row(
    row: Record, config: MaxTextConfig, tokenizer: Tokenizer | None = None
) -> EncodedRow:
    """The tokens and mask of a supervised row. Raises UserError if the row is unusable."""
    try:
        return RowEncoder(config, Split.TRAIN, tokenizer).prepare(row)
    except UnusableRecord as error:
        raise UserError(f"the row cannot be used: {error}") from error


def encode_pair(
    row: Record, config: MaxTextConfig, tokenizer: Tokenizer | None = None
) -> EncodedPair:
    """The tokens and masks of a preference pair. Raises UserError if the row is unusable."""
    try:
        return PairEncoder(config, Split.TRAIN, tokenizer).prepare(row)
    except UnusableRecord as error:
        raise UserError(f"the row cannot be used: {error}") from error


def check_columns(
    config: MaxTextConfig,
    split: Split,
    encoder: "type[TextEncoder]",
    names: Sequence[str] | None,
    named_by: str,
) -> None:
    """Raise ConfigError if data with the columns `names` lacks one that the user set, or fits no
    form of rows. None: any columns.
    """
    if names is None or config.formatting_func_path or config.dataset_processor_path:
        return
    columns = encoder.text_columns(config, split)
    forms = encoder.forms
    missing = [name for name in columns or () if name not in names and name not in OPTIONAL]
    if missing:
        raise ConfigError(
            f"{split.value}_data_columns: {named_by} has no column {missing[0]!r}, only "
            f"{', '.join(names)}"
        )
    if columns is None and not has_form(names, forms):
        raise ConfigError(f"{named_by}: {no_form(names, forms)}")


class TextEncoder(ABC):
    """The common part of encoders of rows and pairs: columns, formatting function, template, tokens
    of texts.
    """

    forms: ClassVar[tuple[tuple[str, ...], ...]]  # the columns of rows that are recognised
    min_columns: ClassVar[int] = 1  # that a user may name
    max_columns: ClassVar[int] = 2
    columns_wanted: ClassVar[str] = "one form of rows"
    may_have_prompt_template: ClassVar[bool] = False
    bad_records: BadRecordList | None = None  # lists those of all streams, if it is set

    def __init__(self, config: MaxTextConfig, split: Split, tokenizer: Tokenizer | None = None):
        self.columns = self.text_columns(config, split)
        self.formatting: Callable[[Record], Record] | None = FormattingFunction.from_config(config)
        self.tokenizer = tokenizer or load_tokenizer(config)
        self.config = config
        self.length = config.max_target_length
        self.add_bos = config.add_bos
        self.add_eos = config.add_eos
        self.reports = RowReports()

    @classmethod
    def text_columns(cls, config: MaxTextConfig, split: Split) -> list[str] | None:
        """The columns that the user set, or None if rows are recognised by their columns: the
        default and the columns of presets are no choice of the user.
        """
        key = f"{split.value}_data_columns"
        columns = list(getattr(config, key))
        source = config.source(key)
        if is_preset(source) or (columns == ["text"] and not source.is_user):
            return None
        has_right_count = cls.min_columns <= len(columns) <= cls.max_columns
        if len(set(columns)) < len(columns) or not (
            has_right_count or has_form(columns, cls.forms)
        ):
            raise ConfigError(f"{key}={columns}: name the columns of {cls.columns_wanted}")
        return columns

    @abstractmethod
    def prepare(self, record: Record) -> EncodedRecord:
        """The tokens of a record, with its remarks. Raises UnusableRecord."""

    def position_fingerprint(self) -> Json:
        """The settings that change the tokens of a row, and with them every data position."""
        return {"add_bos": self.add_bos, "add_eos": self.add_eos}

    def encode(self, prepared: Sequence[EncodedRecord]) -> list[EncodedRecord]:
        """The prepared rows that are trained on."""
        return [row for row in prepared if not DROPPED & set(row.remarks)]

    def format(self, record: Record) -> Record:
        return record if self.formatting is None else self.formatting(record)

    @cached_property
    def template(self) -> ChatTemplate:
        """The template of conversations, which texts do not need. Raises ConfigError if there is
        none.
        """
        template = chat_template(self.config, self.tokenizer, self.may_have_prompt_template)
        if template is None:
            raise ConfigError(
                f"the data has conversations, but the tokenizer {self.tokenizer.name} has no chat "
                "template: set chat_template_path or chat_template"
            )
        return template

    def text_ids(self, text: str) -> list[int]:
        """The tokens of a text, which may contain special tokens, after those that start one."""
        if not self.add_bos:
            return self.tokenizer.encode_with_specials(text)
        ids = self.tokenizer.encode_prompt(text)
        bos_id = self.tokenizer.bos_id
        # A text that was rendered by a template has its own beginning.
        return ids[1:] if bos_id is not None and ids[:2] == [bos_id, bos_id] else ids

    def with_end(self, ids: list[int]) -> list[int]:
        eos_id = self.tokenizer.eos_id
        if not self.add_eos or eos_id is None or ids[-1:] == [eos_id]:
            return ids
        return [*ids, eos_id]


class RowEncoder(TextEncoder):
    """Rows of supervised fine-tuning."""

    forms = ROW_FORMS

    def __init__(self, config: MaxTextConfig, split: Split, tokenizer: Tokenizer | None = None):
        super().__init__(config, split, tokenizer)
        self.completion_only = config.sft_train_on_completion_only

    def position_fingerprint(self) -> Json:
        return {
            **super().position_fingerprint(),
            "sft_train_on_completion_only": self.completion_only,
        }

    def prepare(self, record: Record) -> EncodedRow:
        """The tokens of a record and the mask of those that are trained on. Raises
        UnusableRecord."""
        row = parse_row(self.format(record), self.columns)
        if isinstance(row, Conversation):
            ids, mask = self.conversation(row)
        else:
            ids, mask = self.text(row)
        remarks = []
        if isinstance(row, Conversation) and has_late_system(row.messages):
            remarks.append(Remark.SYSTEM_NOT_FIRST)
        if isinstance(row, Conversation) and not self.trains_on_end(ids, mask):
            remarks.append(Remark.END_NOT_TRAINED_ON)
        if len(ids) > self.length + 1:
            ids, mask = ids[: self.length + 1], mask[: self.length + 1]
            remarks.append(Remark.TRUNCATED)
        if not mask[1:].any():
            remarks = [Remark.NOT_TRAINED_ON]
        return EncodedRow(ids, mask, tuple(remarks))

    def text(self, row: TextRow | PromptCompletion) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(row, TextRow):
            ids, first = self.with_end(self.text_ids(row.text)), 0
        else:
            joined = self.text_ids(row.prompt + row.completion)
            first = common_prefix_length(self.text_ids(row.prompt), joined)
            ids = self.with_end(joined)
        mask = np.ones(len(ids), bool)
        if self.completion_only:
            mask[:first] = False
        return np.array(ids, np.int32), mask

    def conversation(self, row: Conversation) -> tuple[np.ndarray, np.ndarray]:
        if not row.messages:
            raise UnusableRecord("it has no messages")
        try:
            if self.completion_only:
                chat = tokenize_chat(
                    self.template, self.tokenizer, row.messages, row.variables, row.first_turn
                )
                return chat.ids, chat.mask
            text = self.template.render(row.messages, variables=row.variables)
        except ConfigError:
            raise
        except UserError as error:
            raise UnusableRecord(str(error)) from error
        ids = np.array(self.tokenizer.encode_with_specials(text), np.int32)
        return ids, np.ones(len(ids), bool)

    def trains_on_end(self, ids: np.ndarray, mask: np.ndarray) -> bool:
        """Whether a run of tokens that are trained on ends with a special token, or there is
        none."""
        ends = np.flatnonzero(mask & ~np.append(mask[1:], False))
        # If every token is trained on, the newline after the last end-of-turn token is the end.
        tokens = ids[ends] if self.completion_only else ids[mask]
        return not len(ends) or any(int(token) in self.tokenizer.special_ids for token in tokens)


class PairEncoder(TextEncoder):
    """Preference pairs."""

    forms = PAIR_FORMS
    min_columns, max_columns = 2, 3
    columns_wanted = "prompt, chosen and rejected"

    def __init__(self, config: MaxTextConfig, split: Split, tokenizer: Tokenizer | None = None):
        super().__init__(config, split, tokenizer)
        self.max_prompt_length = config.max_prompt_length

    def position_fingerprint(self) -> Json:
        return {**super().position_fingerprint(), "max_prompt_length": self.max_prompt_length}

    def prepare(self, record: Record) -> EncodedPair:
        """The tokens of the prompt and both completions. Raises UnusableRecord."""
        return self.encode_formatted(self.format(record))

    def encode_formatted(self, record: Record) -> EncodedPair:
        row = parse_pair(record, self.columns)
        prompt, chosen, rejected = self.token_ids(row)
        if chosen == rejected:
            raise UnusableRecord("chosen and rejected are equal")
        for name, ids in (("chosen", chosen), ("rejected", rejected)):
            if not ids:
                raise UnusableRecord(f"{name} adds no token to the prompt")
        remarks = []
        if isinstance(row, PreferenceChats) and has_late_system([*row.prompt, *row.chosen]):
            remarks.append(Remark.SYSTEM_NOT_FIRST)
        length = self.prompt_length(len(prompt), max(len(chosen), len(rejected)))
        if length < len(prompt):
            remarks.append(Remark.PROMPT_TRUNCATED)
            prompt = prompt[len(prompt) - length :]
        if not prompt and min(len(chosen), len(rejected)) < 2:  # nothing to predict it from
            remarks = [Remark.NOT_TRAINED_ON]
        most = self.length + 1 - len(prompt)
        if max(len(chosen), len(rejected)) > most:
            chosen, rejected = chosen[:most], rejected[:most]
            remarks = [Remark.CUT_EQUAL] if chosen == rejected else [*remarks, Remark.TRUNCATED]
        return EncodedPair(
            prompt=np.array(prompt, np.int32),
            chosen=np.array(chosen, np.int32),
            rejected=np.array(rejected, np.int32),
            remarks=tuple(remarks),
        )

    def prompt_length(self, prompt: int, completion: int) -> int:
        """The number of tokens of the prompt that are used. Without max_prompt_length a prompt is
        cut, to half of max_target_length, only if the pair does not fit.
        """
        if self.max_prompt_length is not None:
            return min(prompt, self.max_prompt_length)
        if prompt + completion <= self.length + 1:
            return prompt
        return min(prompt, self.length // 2)

    def token_ids(
        self, row: PreferenceTexts | PreferenceChats
    ) -> tuple[list[int], list[int], list[int]]:
        """Prompt, chosen, rejected. A completion starts at the first token that either sequence
        does not have in common with the prompt.
        """
        sequences = self.texts(row) if isinstance(row, PreferenceTexts) else self.chats(row)
        prompt, chosen, rejected = sequences
        first = min(common_prefix_length(prompt, side) for side in (chosen, rejected))
        return prompt[:first], chosen[first:], rejected[first:]

    def texts(self, row: PreferenceTexts) -> tuple[list[int], list[int], list[int]]:
        """The tokens of the prompt, and of the prompt with either completion."""
        start = row.prompt or ""
        chosen, rejected = (
            self.with_end(self.text_ids(start + text)) for text in (row.chosen, row.rejected)
        )
        if row.prompt is None:
            return chosen[: common_prefix_length(chosen, rejected)], chosen, rejected
        return self.text_ids(start), chosen, rejected

    def chats(self, row: PreferenceChats) -> tuple[list[int], list[int], list[int]]:
        """As `texts`, with the generation prompt after the prompt."""
        prompt, template = row.prompt, self.template
        try:
            texts = [
                template.render(prompt, add_generation_prompt=True, variables=row.variables),
                template.render([*prompt, *row.chosen], variables=row.variables),
                template.render([*prompt, *row.rejected], variables=row.variables),
            ]
        except ConfigError:
            raise
        except UserError as error:
            raise UnusableRecord(str(error)) from error
        prompt_ids, chosen_ids, rejected_ids = map(self.tokenizer.encode_with_specials, texts)
        return prompt_ids, chosen_ids, rejected_ids


class ScoredPairEncoder(PairEncoder):
    """Pairs of reward-model training, whose model also reads the last token: after it stands a
    token that is only a target. The column `margin` is optional."""

    def __init__(self, config: MaxTextConfig, split: Split, tokenizer: Tokenizer | None = None):
        super().__init__(config, split, tokenizer)
        self.length -= 1

    def encode_formatted(self, record: Record) -> EncodedPair:
        pair = super().encode_formatted(record)
        margin = record.get(MARGIN)
        if margin is None:
            margin = 0.0
        if isinstance(margin, bool) or not isinstance(margin, int | float):
            raise UnusableRecord(f"{MARGIN} is {margin!r}, and must be a number")
        return replace(
            pair,
            chosen=np.append(pair.chosen, np.int32(0)),
            rejected=np.append(pair.rejected, np.int32(0)),
            margin=float(margin),
        )


class PromptEncoder(TextEncoder):
    """Prompts of reinforcement learning."""

    forms = PROMPT_FORMS
    max_columns = 1
    may_have_prompt_template = True

    def __init__(self, config: MaxTextConfig, split: Split, tokenizer: Tokenizer | None = None):
        super().__init__(config, split, tokenizer)
        self.max_prompt_length = config.max_prefill_predict_length
        # A metric over other problems than those of the data would be wrong.
        self.drops_long_prompts = split is Split.TRAIN
        self.prompt_template = None
        if config.dataset_processor_path:
            self.formatting = DatasetProcessor(config, split, self.tokenizer)
        else:
            self.prompt_template = PromptTemplate.from_config(config)

    def position_fingerprint(self) -> Json:
        return {
            **super().position_fingerprint(),
            "max_prefill_predict_length": self.max_prompt_length,
        }

    def prepare(self, record: Record) -> EncodedPrompt:
        """The tokens of a prompt, with those that start the model's turn. Raises
        UnusableRecord.
        """
        formatted = self.format(record)
        row = parse_prompt(formatted, self.columns)
        prompt = row.prompt
        if self.prompt_template is not None:
            prompt = self.prompt_template.apply(prompt)
        if isinstance(prompt, str):
            ids = self.text_ids(prompt)
        else:
            try:
                text = self.template.render(
                    prompt,
                    add_generation_prompt=True,
                    variables=delimiter_texts(self.config) | row.variables,
                )
            except ConfigError:
                raise
            except UserError as error:
                raise UnusableRecord(str(error)) from error
            ids = self.tokenizer.encode_with_specials(text)
        too_long = len(ids) > min(self.max_prompt_length, self.length - 1)
        if too_long and not self.drops_long_prompts:
            raise UnusableRecord(
                f"its prompt has {len(ids)} tokens, more than max_prefill_predict_length="
                f"{self.max_prompt_length} allows with max_target_length={self.length}: raise them"
            )
        remarks = (Remark.PROMPT_TOO_LONG,) if too_long else ()
        columns = formatted | {"prompt": prompt}
        return EncodedPrompt(np.array(ids, np.int32), columns, remarks)

    def encode(self, prepared: Sequence[EncodedRecord]) -> list[EncodedRecord]:
        return [prompt for prompt in prepared if not prompt.remarks]


def has_late_system(messages: Sequence[Message]) -> bool:
    return any(message["role"] == "system" for message in messages[1:])
