"""The command line as data: an `Option` is a row, from which parsing, `--help`, completion and "did
you mean" follow. options.py has the rows, commands.py the commands.

Arguments that are not options stay in their order; positionals.py reads them. Only the standard
library is imported here, so that help is instant.
"""

import difflib
import math
import os
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from maxtext.common.errors import ConfigError
from maxtext.common.files import REMOTE, path_problem
from maxtext.common.types import Json

FILE_AND_OVERRIDES = "[FILE] [key=value ...]"
COMMON = (
    "FILE is a YAML file or the name of a preset; key=value sets any key of base.yml and\n"
    "overrides FILE. --debug shows the full traceback of an error.\n"
)
HELP_WIDTH = 98
NAME_WIDTH = 30  # a longer name in `--help` has a line of its own
MAX_USAGE_OPTIONS = 5  # more are `[options]` in a line of usage


@dataclass(frozen=True)
class ValueType:
    """The type of an option's value. `read` raises ValueError for a string of another type."""

    takes: str  # the end of the sentence "--port takes …"
    read: Callable[[str], object]
    choices: tuple[str, ...] = ()
    is_local: bool = True  # a URL is an error


def whole_number(low: int, high: int | None = None) -> ValueType:
    def read(text: str) -> int:
        is_number = text.isascii() and text.isdigit() and len(text) < 19
        if not is_number or int(text) < low or (high is not None and int(text) > high):
            raise ValueError
        return int(text)

    limits = f"of at least {low}" if high is None else f"from {low} to {high}"
    return ValueType(f"a whole number {limits}", read)


def positive_number(allow_infinite: bool = False) -> ValueType:
    def read(text: str) -> float:
        value = float(text)
        if not value > 0 or (math.isinf(value) and not allow_infinite):
            raise ValueError
        return value

    return ValueType(f"a number above 0{' or inf' if allow_infinite else ''}", read)


def one_of(*choices: str) -> ValueType:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return ValueType(" or ".join(choices), read, choices=choices)


TEXT = ValueType("a text", str)
ANY_TEXT = ValueType("a text", str, is_local=False)  # a URL, or the name of another machine's file


@dataclass(frozen=True)
class Option:
    name: str
    metavar: str = ""  # of the value; empty: a flag; ends with ` ...`: several values
    help: str = ""  # empty: not in --help
    type: ValueType = TEXT
    default: object = None
    needs: tuple[str, ...] = ()  # options, one of which must be given
    excludes: tuple[str, ...] = ()  # options that may not be given with it
    aliases: tuple[str, ...] = ()
    variable: str = ""  # environment variable with the default
    is_required: bool = False
    # The settings that it stands for: a key, which gets the value; key=value, for a flag; or a
    # function from the value to overrides.
    overrides: str | Callable[[str], list[str]] = ""
    refusal: str = ""  # for an option of another program: the alternative here

    @property
    def takes_several(self) -> bool:
        return self.metavar.endswith(" ...")

    @property
    def usage(self) -> str:
        return f"{self.name} {self.metavar}".strip()

    def settings(self, value: str) -> list[str]:
        """The key=value overrides that the option stands for, with this value."""
        if callable(self.overrides):
            return self.overrides(value)
        if not self.overrides:
            return []
        return [f"{self.overrides}={value}" if self.metavar else self.overrides]

    def read(self, text: str) -> object:
        """Parse a value. Raises ConfigError if the text is of another type."""
        try:
            value = self.type.read(text)
        except ValueError:
            raise ConfigError(f"{self.name} takes {self.type.takes}, not {text[:60]!r}") from None
        if self.type.is_local and REMOTE.match(text):
            raise ConfigError(f"{text!r} {path_problem(text)}")
        return value


Row = tuple[str, str]  # of --help: (an argument, key=value or option, what it means)


@dataclass(frozen=True)
class Form:
    """A task of a command, such as `maxtext data inspect`, or a whole command without tasks."""

    args: str = FILE_AND_OVERRIDES  # besides options, for a line of usage
    options: tuple[Option, ...] = ()
    help: str = ""
    rows: str = ""  # rows of --help before the options: see `read_rows`
    module: str = ""  # of cli/; default: the command's module
    ends_with_text: bool = False  # everything after the first argument is text, not options

    def find(self, name: str) -> Option | None:
        name = re.sub("_", "-", name) if name.startswith("--") else name
        matches = (option for option in self.options if name in (option.name, *option.aliases))
        return next(matches, None)

    def usage(self, command: str) -> str:
        shown = [option for option in self.options if option.help]
        names = [option.usage if option.is_required else f"[{option.usage}]" for option in shown]
        args, dashes, rest = self.args.partition("-- ")
        parts = [command, args, *(["[options]"] if len(shown) > MAX_USAGE_OPTIONS else names)]
        return " ".join(part.strip() for part in [*parts, dashes + rest] if part)


@dataclass(frozen=True)
class Command:
    summary: str
    example: str
    forms: dict[str, Form] = field(default_factory=lambda: {"": Form()})
    takes_file: bool = True  # a FILE and key=value arguments


@dataclass
class Arguments:
    """The arguments after `maxtext`, with the options taken out."""

    command: str
    form: Form
    task: str = ""  # the name of the form
    args: list[str] = field(default_factory=list)  # positional ones, and key=value overrides
    settings: list[str] = field(default_factory=list)  # key=value that options stand for
    rest: list[str] = field(default_factory=list)  # after `--`
    values: Json = field(default_factory=dict)  # of the options that are given

    def __getitem__(self, name: str) -> Any:
        """The value of an option, or its default."""
        option = self.form.find(name)
        assert option is not None, f"{self.command} has no option {name}"
        if name in self.values:
            return self.values[name]
        if option.variable and (text := os.environ.get(option.variable)):
            return [text] if option.takes_several else text
        if option.takes_several:
            return []
        return option.default if option.metavar else False

    @property
    def usage(self) -> str:
        return self.form.usage(f"maxtext {self.command} {self.task}".strip())

    @property
    def module(self) -> str:
        """The name of the module that runs it."""
        return self.form.module or self.command.replace("-", "_")

    @property
    def all_args(self) -> list[str]:
        """`args`, and the key=value overrides that options stand for."""
        return [*self.args, *self.settings]


def parse(name: str, command: Command, args: list[str]) -> Arguments:
    """Raises ConfigError for the first argument that is wrong."""
    task, args = choose_form(name, command, list(args))
    form = command.forms[task]
    parsed = Arguments(name, form, task)
    while args:
        arg = args.pop(0)
        is_text = form.ends_with_text and parsed.args and form.find(arg) is None
        if arg == "--" and "-- " in form.args:
            parsed.rest, args = args, []
        elif arg.startswith("-") and not is_text:
            take_option(parsed, command, arg, args)
        else:
            if not is_text and REMOTE.match(arg):
                raise ConfigError(f"{arg!r} {path_problem(arg)}")
            parsed.args.append(arg)
    check_options(parsed)
    check_number(parsed)
    return parsed


def choose_form(name: str, command: Command, args: list[str]) -> tuple[str, list[str]]:
    """(task, arguments without its name). Options may stand before it."""
    forms = command.forms
    if args and args[0].startswith("-"):
        named = [index for index, arg in enumerate(args) if arg in forms and arg]
        args = [args.pop(named[0]), *args] if named else args
    if args and args[0] in forms and args[0]:
        return args[0], args[1:]
    if "" in forms:
        # An argument that is almost a task is neither a preset nor a file.
        near = difflib.get_close_matches("".join(args[:1]), [*filter(None, forms)], 1, 0.8)
        if near and not os.path.exists(args[0]):
            hint = f"did you mean {near[0]}?"
            raise ConfigError(f"unknown task {args[0]!r} of maxtext {name}; {hint}")
        return "", args
    if not args or args[0].startswith("-"):
        raise ConfigError(f"name a task: maxtext {name} {'|'.join(forms)}")
    from maxtext.configs.sources import suggest

    hint = suggest(args[0], forms) or f"; name a task: maxtext {name} {'|'.join(forms)}"
    raise ConfigError(f"unknown task {args[0]!r} of maxtext {name}{hint}")


def take_option(parsed: Arguments, command: Command, arg: str, args: list[str]) -> None:
    """Store an option, whose values are taken from the arguments after it."""
    flag, equals, inline = arg.partition("=")
    option = parsed.form.find(flag)
    if option is None:
        raise unknown_option(parsed, command, arg)
    if option.refusal:
        raise ConfigError(f"{option.name} is vLLM's and does nothing here: {option.refusal}")
    if option.name in parsed.values and not option.takes_several:
        raise ConfigError(f"{option.name} is given twice: leave one out")
    if not option.metavar:
        if equals:
            raise ConfigError(f"{option.name} takes no value: write {option.name} alone")
        parsed.values[option.name] = True
        parsed.settings += option.settings("")
        return
    text = inline if equals else "".join(args[:1])
    del args[: 0 if equals else 1]
    # -1 is a value, though maybe a wrong one; --rows is an option
    if not text or re.match(r"-[^0-9.]", text):
        raise ConfigError(f"{option.name} needs a value")
    if not option.takes_several:
        parsed.values[option.name] = option.read(text)
        parsed.settings += option.settings(text)
        return
    values = parsed.values.setdefault(option.name, [])
    values.append(option.read(text))
    while args and not args[0].startswith("-") and not is_setting(args[0], option):
        values.append(option.read(args.pop(0)))


def is_setting(arg: str, option: Option) -> bool:
    """Whether key=value ends the values of an option. Values with a = end at a known key."""
    match = re.match(r"([a-z][a-z0-9_]*)=", arg)
    if match is None or "=" not in option.metavar:
        return match is not None
    from maxtext.configs import fields

    return match[1] in fields.KEYS


def unknown_option(parsed: Arguments, command: Command, arg: str) -> ConfigError:
    from maxtext.configs import fields, sources

    flag = arg.partition("=")[0]
    others = [task for task, form in command.forms.items() if form.find(flag)]
    if others:
        name = f"maxtext {parsed.command} {parsed.task}".strip()
        return ConfigError(f"{flag} would do nothing in {name}: it is for {' and '.join(others)}")
    key = flag.lstrip("-").replace("-", "_")
    if key in fields.KEYS:
        return ConfigError(
            f"unknown option {arg!r}; settings are written key=value, without dashes: write "
            f"{key}=VALUE"
        )
    options = [option for option in parsed.form.options if not option.refusal]
    names = {option.name.lstrip("-"): option.name for option in options}
    if hint := sources.suggest(flag.lstrip("-"), names):
        near = re.sub(r"[\w-]+", lambda name: names.get(name[0], name[0]), hint)
        return ConfigError(f"unknown option {arg!r}{near}")
    hint = "; settings are written key=value, without dashes" if "=" in parsed.form.args else ""
    hint = hint or f"; `maxtext {parsed.command} --help` lists the options"
    return ConfigError(f"unknown option {arg!r}{hint}")


def check_options(parsed: Arguments) -> None:
    """Raise ConfigError for an option that needs another one, or excludes it."""
    for option in parsed.form.options:
        if option.name not in parsed.values:
            if option.is_required:
                raise ConfigError(f"{option.usage} is missing: {parsed.usage}")
            continue
        if option.needs and not any(name in parsed.values for name in option.needs):
            needs = " or ".join(option.needs)
            raise ConfigError(f"{option.name} would do nothing: it needs {needs}")
        for name in option.excludes:
            if name in parsed.values:
                raise ConfigError(f"{option.name} and {name} exclude each other: leave one out")


def check_number(parsed: Arguments) -> None:
    """Raise ConfigError for too few or too many arguments, where their number is fixed."""
    form, args = parsed.form, parsed.args
    if "..." in form.args or "=" in form.args:
        return
    names = form.args.split()
    required = [name for name in names if not name.startswith("[")]
    if len(args) < len(required):
        raise ConfigError(f"{required[len(args)]} is missing: {parsed.usage}")
    if len(args) > len(names):
        raise ConfigError(f"unknown argument {args[len(names)]!r}: {parsed.usage}")


def command_help(name: str, command: Command) -> str:
    usages = [form.usage(f"maxtext {name} {task}".strip()) for task, form in command.forms.items()]
    indent = " " * 7
    usage = "\n".join(
        textwrap.fill(
            line, HELP_WIDTH, initial_indent=indent, subsequent_indent=indent + " " * 5,
            break_long_words=False, break_on_hyphens=False,
        )
        for line in usages
    )  # fmt: skip
    parts = [f"usage: {usage.lstrip()}", f"{command.summary[0].upper()}{command.summary[1:]}."]
    lines = []
    for task, form in command.forms.items():
        rows = [*read_rows(form.rows), *option_rows(form)]
        lines += format_rows([(task, form.help)], 2) if task else []
        lines += format_rows(rows, 4 if task else 2)
    parts += ["\n".join(lines)] if lines else []
    if command.takes_file:
        parts.append(COMMON.rstrip())
    return "\n\n".join([*parts, f"example: {command.example}"]) + "\n"


def read_rows(text: str) -> list[Row]:
    """A row a line: a name, at least two spaces, its meaning. Lines that begin with spaces belong
    to the row before.
    """
    rows = []
    for line in re.sub(r"\n\s+", " ", text).splitlines():
        name, _, meaning = re.sub(r"\s{2,}", "\t", line, count=1).partition("\t")
        rows.append((name, meaning))
    return rows


def option_rows(form: Form) -> list[Row]:
    """(usage, meaning) of the options, with their defaults."""
    rows = []
    for option in form.options:
        default = "" if option.default is None else f"{option.default}"
        default = f"the variable {option.variable}" if option.variable else default
        text = option.help
        text += f" (default: {default})" if default else ""
        text += f"; needs {' or '.join(option.needs)}" if option.needs else ""
        if option.help:
            rows.append((option.usage, text))
    return rows


def format_rows(rows: list[Row], indent: int) -> list[str]:
    """Rows in two columns. A long name gets its own line."""
    widths = [len(name) for name, _ in rows if len(name) <= NAME_WIDTH]
    width = max(widths, default=NAME_WIDTH)
    lines = []
    for name, text in rows:
        wrapped = textwrap.wrap(
            text, HELP_WIDTH - indent - width - 3, break_long_words=False, break_on_hyphens=False
        )
        if len(name) > width:
            lines.append(name)
            name = ""
        first, *more = wrapped or [""]
        lines.append(f"{name:{width}}   {first}".rstrip())
        lines += [f"{'':{width}}   {line}" for line in more]
    return [" " * indent + line for line in lines]
