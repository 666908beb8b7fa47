"""Schemas of functions, against transformers."""

from enum import Enum
from typing import Any, Literal, Optional, Union

import pytest
from transformers.utils import get_json_schema

from maxtext.common.errors import ConfigError
from maxtext.trainers.methods.rl.agents.tools import function_schema


class Unit(Enum):
    METRE = "m"
    FOOT = "ft"


def multiply(x: float, y: int = 2) -> float:
    """Multiply two numbers.

    Args:
        x: The first number
        y: The second number,
            which may be left out
    """
    return x * y


def search(
    query: str,
    kinds: list[str],
    limit: int | None = None,
    order: Literal["new", "old"] = "new",
    unit: Unit = Unit.METRE,
    weights: Optional[dict[str, float]] = None,  # noqa: UP045
    span: tuple[int, str] = (0, ""),
    either: Union[int, str, list[int]] = 0,  # noqa: UP007
    number: int | float = 0,
    anything: Any = None,
    pairs: list[list[int]] | None = None,
) -> list[str]:
    """Search the archive.

    It knows every document.

    Args:
        query: What to look for: words, or "a phrase"
        kinds: Kinds of documents
        limit: How many
        order: Which first
        unit: Of lengths
        weights: Of kinds
        span: First and last
        either: One of three
        number: Any number
        anything: Whatever
        pairs: Of pairs

    Returns:
        The titles.
    """
    return [query]


def pour(drink: str) -> None:
    """Pour a drink.

    Args:
        drink: Which one (choices: ["tea", "coffee"])
    """


@pytest.mark.parametrize("function", [multiply, search, pour])
def test_schema_equals_transformers(function):
    assert function_schema(function) == get_json_schema(function)


def test_methods_have_no_self():
    class Shop:
        def buy(self, item: str) -> str:
            """Buy an item.

            Args:
                item: Its name
            """
            return item

    assert function_schema(Shop().buy) == get_json_schema(Shop().buy)


def untyped(x):
    """Double.

    Args:
        x: A number
    """


def undocumented(x: int) -> int:
    return x


def of_a_class(x: Exception) -> None:
    """Raise."""


def many(*numbers: int) -> None:
    """Add."""


def bad_choices(x: str) -> None:
    """Choose.

    Args:
        x: One (choices: a, b)
    """


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (untyped, "the argument x of the tool untyped has no type hint"),
        (undocumented, "the tool undocumented has no docstring"),
        (of_a_class, "the argument x of the tool of_a_class has the type"),
        (many, "the argument numbers of the tool many has no name in a call"),
        (bad_choices, "must be a JSON list"),
    ],
)
def test_functions_that_cannot_be_tools(function, message):
    with pytest.raises(ConfigError, match=message):
        function_schema(function)
