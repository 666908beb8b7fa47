"""base.yml, written from the declarations of the keys: `python3 -m maxtext.configs.base_file`.

It has three parts: the keys that act, by group; the computed keys; and those that do not act, by
reason.
"""

import textwrap

from maxtext.configs import serialize
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
KINDS = {"not_yet": "Not yet", "never": "Never"}


def base_text() -> str:
    """The text of base.yml."""
    inert: dict[str, list[str]] = {}
    acting, computed = [], ""
    for group in GROUPS:
        title = f"{group.__name__}: {group.__doc__}"
        if group is DerivedValues:
            computed = section(title, list(group.model_fields))
            continue
        keys = [key for key in group.model_fields if declaration(key).status.kind == "acts"]
        acting += [section(title, keys)] if keys else []
        for key in group.model_fields:
            status = declaration(key).status
            if status.kind in KINDS:
                inert.setdefault(f"{KINDS[status.kind]}: {status.reason}", []).append(key)
    titles = sorted(inert, key=lambda title: title.startswith(KINDS["never"]))
    sections = [section(title, inert[title]) for title in titles]
    parts = [
        HEADER,
        "# ==== Keys that act\n",
        *acting,
        "# ==== Computed keys\n",
        computed,
        "# ==== Keys that do not act\n"
        "# Setting one of them to another value is an error that gives the reason.\n",
        *sections,
    ]
    return "\n".join(parts)


def section(title: str, keys: list[str]) -> str:
    lines = textwrap.wrap(title, WIDTH - 7, break_long_words=False, break_on_hyphens=False)
    return "".join([*(f"# ---- {line}\n" for line in lines), *map(entry, keys)])


def entry(key: str) -> str:
    """The lines of a key: its value, with its meaning on the same line if there is room."""
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


if __name__ == "__main__":
    BASE.write_text(base_text(), encoding="utf-8")
