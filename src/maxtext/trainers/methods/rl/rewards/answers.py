"""Answers of completions and of rows, as texts and numbers, and the keys that rewards read."""

import json
import re
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from pydantic import ValidationError

from maxtext.common.errors import ConfigError
from maxtext.configs.types import Settings
from maxtext.configs.types.rl_scoring import Reward, SpecialTokens

BOXED = "\\boxed{"
GSM8K_MARK = "####"
# "B) 42", "(B) 42", "B. 42", "B: 42": a letter and the text that it stands for
CHOICE = re.compile(r"\(?([A-J])[).:]\s+(\S.*)", re.DOTALL)
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?")
MAX_DIGITS = 400  # of a number; a longer one is text
# What `normalize` makes of fractions, mixed numbers and "5 million"
FRACTION = re.compile(r"(-?)(?:\\frac\{(-?\d+)\}\{(\d+)\}|\\frac(\d)(\d)|(\d+)/(\d+))")
MIXED = re.compile(r"(-?)\((\d+)\+(\\frac\{\d+\}\{\d+\})\)")
SCALED = re.compile(r"(.+) \\cdot 10\^\{(\d{1,2})\}")


class RewardKeys(Reward, SpecialTokens):
    """Points, penalties, and the texts that delimit reasoning and answer."""

    reasoning_start_token_in_prompt: bool = False

    @classmethod
    def from_python(cls, **keys: Any) -> "RewardKeys":
        """Raises ConfigError for an unknown key or an invalid value."""
        try:
            return cls(**keys)
        except ValidationError as error:
            problems = [
                f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
                for problem in error.errors()
            ]
            raise ConfigError(*problems) from error

    @classmethod
    def from_config(cls, config: Settings) -> "RewardKeys":
        return cls(**{name: getattr(config, name) for name in cls.model_fields})


def read_answer(completion: str, config: RewardKeys) -> str | None:
    """The answer in a completion: the last \\boxed{} in the last solution, else the solution; in a
    completion without a solution, the last \\boxed{}; else None."""
    solution = last_solution(completion, config)
    boxed = last_boxed(completion if solution is None else solution)
    answer = solution if boxed is None else boxed
    return answer if answer and answer.strip() else None


def last_solution(completion: str, config: RewardKeys) -> str | None:
    """The text between the last pair of solution tokens."""
    start, end = config.solution_start_token, config.solution_end_token
    matches = re.findall(f"{re.escape(start)}(.*?){re.escape(end)}", completion, re.DOTALL)
    return matches[-1].rpartition(start)[2] if matches else None


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{} with balanced braces."""
    start = text.rfind(BOXED)
    while start >= 0:
        depth, first = 1, start + len(BOXED)
        for index in range(first, len(text)):
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            if depth == 0:
                return text[first:index]
        start = text.rfind(BOXED, 0, start)
    return None


def accepted_answers(answer: object) -> tuple[str, ...]:
    """The texts that count as right: of a list, of JSON text of a list, or of a single answer; none
    for None.

    A text with #### (GSM8K) has its answer after it. Of a choice such as "(B) 42", the letter, its
    text and both together count.
    """
    texts: list[str] = []
    for each in answer_list(answer):
        text = str(each)
        if GSM8K_MARK in text:
            text = text.rpartition(GSM8K_MARK)[2].strip()
        choice = CHOICE.fullmatch(text.strip())
        texts += (text, choice[1], choice[2].strip()) if choice else (text,)
    return tuple(dict.fromkeys(texts))


def answer_list(answer: object) -> Iterable[object]:
    if answer is None:
        return []
    if isinstance(answer, str) and answer.lstrip().startswith("["):
        try:
            parsed = json.loads(answer)
        except json.JSONDecodeError:
            return [answer]
        if not isinstance(parsed, list):
            return [answer]
        # [1, 2] are two answers, or one that is a list or an interval.
        has_texts = bool(parsed) and all(isinstance(each, str) for each in parsed)
        return parsed if has_texts else [*parsed, answer]
    if isinstance(answer, str) or not isinstance(answer, Iterable):
        return [answer]
    return answer


def parse_number(text: str) -> Decimal | None:
    """The number that a text is, with thousands separators or without; None for other texts."""
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text.strip())
    if len(plain) > MAX_DIGITS or not NUMBER.fullmatch(plain):
        return None
    return Decimal(plain)


def choice_letter(text: str) -> str | None:
    """The letter of a choice with its text, such as "(B) 42"; None for other texts."""
    choice = CHOICE.fullmatch(text.strip())
    return choice[1] if choice else None


def parse_value(text: str) -> Fraction | None:
    """The number that a normalized text is: a decimal or a percentage, a fraction, a mixed number,
    or a product with a power of ten; None for other texts."""
    text = text.removesuffix("%").strip()
    number = parse_number(text)
    if number is not None:
        return Fraction(number)
    if len(text) > MAX_DIGITS:
        return None
    if fraction := FRACTION.fullmatch(text):
        sign, *parts = fraction.groups()
        numerator, denominator = (int(part) for part in parts if part is not None)
        value = Fraction(numerator, denominator) if denominator else None
        return -value if sign and value is not None else value
    if mixed := MIXED.fullmatch(text):
        part = parse_value(mixed[3])
        return None if part is None else (-1 if mixed[1] else 1) * (int(mixed[2]) + part)
    if scaled := SCALED.fullmatch(text):
        factor = parse_value(scaled[1])
        return None if factor is None else factor * 10 ** int(scaled[2])
    return None
