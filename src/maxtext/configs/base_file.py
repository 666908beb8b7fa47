"""base.yml and docs/keys.md, written from the declarations of the keys:
`python3 -m maxtext.configs.base_file`.

Both have three parts: the keys that act, by group; the computed keys; and those that do not act, by
reason.
"""

import textwrap
from pathlib import Path

from maxtext.configs import fields, serialize
from maxtext.configs.rules import RULES
from maxtext.configs.sources import BASE
from maxtext.configs.types import GROUPS, DerivedValues, Settings, declaration

WIDTH = 100
HEADER = """\
# Every key of maxtext with its default. Later layers override earlier ones: this file, the model's
# file (models/<model_name>.yml), M_KEY environment variables, key=value arguments. Keep your own
# settings in a small file that starts with `base_config: base.yml`.
#
# This file has three parts: the keys that act, the computed keys, and the keys that do not act.
# `maxtext config explain KEY` describes a key, `maxtext config status` lists the keys that act.
# It is written from configs/types by `python3 -m maxtext.configs.base_file`.
"""
REFERENCE = Path(__file__).parents[3] / "docs" / "keys.md"  # in a checkout
REFERENCE_HEADER = """\
# Configuration keys

Every key, with its default, its values and what it needs in order to act. `maxtext config explain
KEY` shows a key with its value and source in a run, and [configuration.md](configuration.md) says
where values come from. `make format` writes this page and
[`base.yml`](../src/maxtext/configs/base.yml) from `configs/types`.
"""
REFERENCE_COLUMNS = ("key", "default", "values", "meaning", "needs")
LONGEST_DEFAULT = 40  # characters
KINDS = {"not_yet": "Not yet", "never": "Never"}


def base_text() -> str:
    """The text of base.yml."""
    acting, computed, inert = parts()
    return "\n".join(
        [
            HEADER,
            "# ==== Keys that act\n",
            *(section(title, keys) for title, keys in acting.items()),
            "# ==== Computed keys\n",
            *(section(title, keys) for title, keys in computed.items()),
            "# ==== Keys that do not act\n"
            "# Setting one of them to another value is an error that gives the reason.\n",
            *(section(title, keys) for title, keys in inert.items()),
        ]
    )


def parts() -> tuple[dict[str, list[str]], dict[str, list[str]], dict[str, list[str]]]:
    """The keys that act and the computed keys by group, and those that do not act by reason."""
    acting: dict[str, list[str]] = {}
    computed: dict[str, list[str]] = {}
    inert: dict[str, list[str]] = {}
    for group in GROUPS:
        title = f"{group.__name__}: {group.__doc__}"
        if group is DerivedValues:
            computed[title] = list(group.model_fields)
            continue
        for key in group.model_fields:
            status = declaration(key).status
            if status.kind == "acts":
                acting.setdefault(title, []).append(key)
            elif status.kind in KINDS:
                inert.setdefault(f"{KINDS[status.kind]}: {status.reason}", []).append(key)
    titles = sorted(inert, key=lambda title: title.startswith(KINDS["never"]))
    return acting, computed, {title: inert[title] for title in titles}


def section(title: str, keys: list[str]) -> str:
    lines = textwrap.wrap(title, WIDTH - 7, break_long_words=False, break_on_hyphens=False)
    return "".join([*(f"# ---- {line}\n" for line in lines), *map(entry, keys)])


def entry(key: str) -> str:
    """The lines of a key: its value, with its meaning on the same line if it fits."""
    declared = declaration(key)
    default = Settings.model_fields[key].get_default(call_default_factory=True)
    value = value_text(key, default if declared.base is None else declared.base)
    line = f"{value}  # {declared.meaning}\n"
    if len(line) <= WIDTH + 1 and "\n" not in value:
        return line
    comment = textwrap.wrap(
        declared.meaning, WIDTH - 2, break_long_words=False, break_on_hyphens=False
    )
    return "".join([*(f"# {text}\n" for text in comment), value, "\n"])


def value_text(key: str, value: object) -> str:
    """`key: value`, with a long list in several lines."""
    if value == "":
        return f'{key}: ""'
    text = serialize.yaml_line(key, value)
    if len(text) <= WIDTH or text.count("\n"):
        lines = (
            textwrap.wrap(line, WIDTH, subsequent_indent=" " * 5, break_on_hyphens=False)
            for line in text.split("\n")
        )
        return "\n".join(part for line in lines for part in line or [""])
    wrapped = textwrap.fill(
        text.removeprefix(f"{key}: "), WIDTH, initial_indent="  ", subsequent_indent=" " * 3
    )
    return f"{key}:\n{wrapped}"


def reference_text() -> str:
    """The text of docs/keys.md."""
    acting, computed, inert = parts()
    return "\n".join(
        [
            REFERENCE_HEADER,
            *(table(title, keys, REFERENCE_COLUMNS) for title, keys in acting.items()),
            *(table(title, keys, ("key", "meaning")) for title, keys in computed.items()),
            "## Keys that do not act\n\n"
            "Setting one of them to another value is an error that gives the reason.\n",
            *(
                f"{title}:\n{', '.join(f'`{key}`' for key in keys)}.\n"
                for title, keys in inert.items()
            ),
        ]
    )


def table(title: str, keys: list[str], columns: tuple[str, ...]) -> str:
    name, _, text = title.partition(": ")
    rows = [columns, ("---",) * len(columns), *(cells(key, columns) for key in keys)]
    lines = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return f"## {name}\n\n{text}\n\n{lines}"


def cells(key: str, columns: tuple[str, ...]) -> tuple[str, ...]:
    declared = declaration(key)
    default = Settings.model_fields[key].get_default(call_default_factory=True)
    value = serialize.compact(default if declared.base is None else declared.base)
    choices = ", ".join(f"`{choice}`" for choice in declared.choices if choice)
    needs = RULES.requirements.get(key, ())
    texts = {
        "key": f"`{key}`",
        "default": "empty"
        if value == "''"
        else f"`{value}`"
        if len(value) <= LONGEST_DEFAULT
        else "see base.yml",
        "values": choices or declared.bounds or fields.describe(key),
        "meaning": declared.meaning,
        "needs": "; ".join(need for need in needs if isinstance(need, str)),
    }
    return tuple(texts[column].replace("|", "\\|").replace("\n", " ") for column in columns)


def short(default: str) -> str:
    """A default for a cell of a table."""
    if default == "''":
        return "empty"
    return f"`{default}`" if len(default) <= LONGEST_DEFAULT else "see base.yml"


if __name__ == "__main__":
    BASE.write_text(base_text(), encoding="utf-8")
    REFERENCE.write_text(reference_text(), encoding="utf-8")
