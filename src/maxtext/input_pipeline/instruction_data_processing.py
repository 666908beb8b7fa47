"""Formatting functions for formatting_func_path, under the names that MaxText's files use."""

import re
from collections.abc import Mapping

from maxtext.common.errors import ConfigError
from maxtext.common.types import Json

PLACEHOLDER = re.compile(r"(?<!\{)\{(\w+)\}(?!\})")


def math_qa_formatting(
    example: Mapping[str, str], template_config: Mapping[str, str] | None = None
) -> Json:
    """A question and its answer as a conversation.

    `template_config` may have PROMPT_TEMPLATE with {question}, and COMPLETION_TEMPLATE with
    {answer}. With REASONING_ANSWER_SEPARATOR the answer is split there, and {reasoning} is its
    first part. Raises ConfigError if a template lacks a placeholder, and ValueError if an answer
    does not have the separator exactly once.
    """
    templates = template_config or {}
    question, answer = example["question"], example["answer"]
    if prompt := templates.get("PROMPT_TEMPLATE"):
        check_placeholders("PROMPT_TEMPLATE", prompt, "question")
        question = prompt.format(question=question.strip())
    if completion := templates.get("COMPLETION_TEMPLATE"):
        separator = templates.get("REASONING_ANSWER_SEPARATOR")
        if separator:
            check_placeholders("COMPLETION_TEMPLATE", completion, "reasoning", "answer")
            parts = answer.split(separator)
            if len(parts) != 2:
                raise ValueError(f"the answer has {separator!r} {len(parts) - 1} times, not once")
            answer = completion.format(reasoning=parts[0].strip(), answer=parts[1].strip())
        else:
            check_placeholders("COMPLETION_TEMPLATE", completion, "answer")
            answer = completion.format(answer=answer.strip())
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def check_placeholders(name: str, template: str, *wanted: str) -> None:
    missing = set(wanted) - set(PLACEHOLDER.findall(template))
    if missing:
        raise ConfigError(f"{name} has no placeholder {{{sorted(missing)[0]}}}: {template!r}")
