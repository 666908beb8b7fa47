"""Prompts of reinforcement learning from questions, by templates and functions that MaxText reads.

A JSON file at data_template_path, or at chat_template_path, has TEMPLATE, with {system_prompt} and
{question}, and SYSTEM_PROMPT, with {reasoning_start_token} and the other texts that rewards look
for. A file at dataset_processor_path has a function process_data, which returns a row with the
column `prompts`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maxtext.common.errors import ConfigError
from maxtext.common.files import read_json_object
from maxtext.common.types import Json
from maxtext.configs.types import MaxTextConfig
from maxtext.configs.types.rl_scoring import SpecialTokens
from maxtext.input_pipeline.formats import Record, UnusableRecord
from maxtext.input_pipeline.formatting import call_user_function, load_function
from maxtext.input_pipeline.interface import Split
from maxtext.input_pipeline.row_forms import Message
from maxtext.tokenizers import Tokenizer
from maxtext.tokenizers import chat_template as find_chat_template

TEMPLATE, SYSTEM_PROMPT = "TEMPLATE", "SYSTEM_PROMPT"
PROCESS_DATA = "process_data"


def delimiter_texts(config: MaxTextConfig) -> dict[str, str]:
    """The keys reasoning_start_token, reasoning_end_token, solution_start_token and
    solution_end_token, which templates may use as variables."""
    return {name: getattr(config, name) for name in SpecialTokens.model_fields}


def template_key(config: MaxTextConfig) -> str:
    """The key that names the file of the template."""
    return "data_template_path" if config.data_template_path else "chat_template_path"


def read_template_file(config: MaxTextConfig) -> Json:
    """The object of the JSON file of the template; empty if chat_template_path is another file.
    Raises ConfigError if data_template_path has no TEMPLATE."""
    key = template_key(config)
    path = Path(getattr(config, key)).expanduser()
    if key == "chat_template_path":
        return read_json_object(path) if path.suffix == ".json" else {}
    if not path.is_file():
        raise ConfigError(f"{key}={path}: there is no such file; name a JSON file with {TEMPLATE}")
    entries = read_json_object(path)
    if TEMPLATE not in entries:
        raise ConfigError(f"{key}={path} has no {TEMPLATE}: the text around a question")
    return entries


@dataclass(frozen=True)
class PromptTemplate:
    """The text around a question. `values`: of the placeholders other than {question}."""

    template: str
    values: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: MaxTextConfig) -> "PromptTemplate | None":
        """None if there is no TEMPLATE. Raises ConfigError if it is no text with {question}."""
        key = template_key(config)
        entries = read_template_file(config)
        if TEMPLATE not in entries:
            return None
        template, system_prompt = entries[TEMPLATE], entries.get(SYSTEM_PROMPT, "")
        for name, text in ((TEMPLATE, template), (SYSTEM_PROMPT, system_prompt)):
            if not isinstance(text, str):
                raise ConfigError(f"{key}={getattr(config, key)}: {name} is no text")
        if "{question}" not in template:
            raise ConfigError(f"{key}={getattr(config, key)}: {TEMPLATE} has no {{question}}")
        texts = delimiter_texts(config)
        return cls(template, texts | {"system_prompt": fill(system_prompt, texts)})

    def apply(self, prompt: str | Sequence[Message]) -> list[Message]:
        """Messages in which the question, a text or the last message, stands in the template."""
        if isinstance(prompt, str):
            return [{"role": "user", "content": self.fill(prompt)}]
        *before, last = prompt
        if not isinstance(last.get("content"), str):
            raise UnusableRecord("its last message is no text, which TEMPLATE needs as question")
        return [*before, {**last, "content": self.fill(last["content"])}]

    def fill(self, question: str) -> str:
        return fill(self.template, {**self.values, "question": question})


def fill(template: str, values: Mapping[str, str]) -> str:
    """The template with the values of {name}; other braces, as of LaTeX, stay as they are."""
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), template)


class ProcessorTokenizer:
    """A tokenizer with the method of transformers' tokenizers that functions of users call."""

    def __init__(self, config: MaxTextConfig, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.config = config
        self.template = find_chat_template(config, tokenizer, may_be_prompt=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str | list[int]:
        """`chat_template`: a template, or the name of one of the tokenizer's."""
        template = self.template
        if chat_template is not None:
            changes = {"chat_template": chat_template, "chat_template_path": ""}
            template = find_chat_template(self.config.model_copy(update=changes), self.tokenizer)
        if template is None:
            raise ConfigError(
                f"{PROCESS_DATA} uses a chat template, and the tokenizer {self.tokenizer.name} has "
                "none: set chat_template"
            )
        text = template.render(
            conversation, add_generation_prompt=add_generation_prompt, variables=variables
        )
        return self.tokenizer.encode_with_specials(text) if tokenize else text


class DatasetProcessor:
    """`process_data(dataset_name, model_tokenizer, template_config, tmvp_config, x)` of
    dataset_processor_path. Raises ConfigError if it cannot be loaded."""

    def __init__(self, config: MaxTextConfig, split: Split, tokenizer: Tokenizer):
        self.path = config.dataset_processor_path
        self.function = load_function(f"{self.path}:{PROCESS_DATA}", key="dataset_processor_path")
        is_training = split is Split.TRAIN
        self.dataset_name = config.dataset_name if is_training else config.eval_dataset_name
        self.config = config
        self.tokenizer = ProcessorTokenizer(config, tokenizer)
        self.template_config = read_template_file(config)

    def __call__(self, record: Record) -> Record:
        """The row of a record, with the column `prompt`. Raises UnusableRecord if the function
        fails."""
        setting = f"dataset_processor_path={self.path}"
        context = self.dataset_name, self.tokenizer, self.template_config, self.config
        row = call_user_function(setting, self.function, *context, dict(record))
        if not isinstance(row, dict) or not {"prompts", "prompt"} & row.keys():
            raise UnusableRecord(f"{setting} returned no record with the column prompts")
        row = dict(row)
        if "prompts" in row:
            row["prompt"] = row.pop("prompts")
        return row
