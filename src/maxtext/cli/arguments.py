"""Takes the options of a command from its arguments; positionals.py reads what is left."""

import math
import re
from collections.abc import Collection

from maxtext.common.errors import ConfigError
from maxtext.common.files import REMOTE, path_problem


def refuse_remote(args: list[str]) -> None:
    """Raise ConfigError if an argument or the value of an option is a URL. `load` checks key=value
    overrides.
    """
    for arg in args:
        value = arg.partition("=")[2] if arg.startswith("--") else arg
        if REMOTE.match(value):
            raise ConfigError(f"{value!r} {path_problem(value)}")


def take_flag(args: list[str], flag: str) -> bool:
    """Remove a flag from the arguments and return whether it was present."""
    present = flag in args
    while flag in args:
        args.remove(flag)
    return present


def take_value(args: list[str], option: str) -> str | None:
    """Remove `--option value` or `--option=value` from the arguments and return the value."""
    for index, arg in enumerate(args):
        if arg == option or arg.startswith(f"{option}="):
            inline = "=" in arg
            value = arg.partition("=")[2] if inline else "".join(args[index + 1 : index + 2])
            del args[index : index + (1 if inline else 2)]
            # -1 is a value, though maybe a wrong one; --rows is an option
            if not value or re.match(r"-[^0-9.]", value):
                raise ConfigError(f"{option} needs a value")
            return value
    return None


def take_values(args: list[str], option: str, keys: Collection[str] | None = None) -> list[str]:
    """Remove every `--option value ...` from the arguments and return the values. They end with the
    next option or key=value argument, where the key is one of `keys`, if these are given; the first
    may be anything.
    """

    def is_setting(arg: str) -> bool:
        match = re.match(r"([a-z][a-z0-9_]*)=", arg)
        return match is not None and (keys is None or match[1] in keys)

    values: list[str] = []
    while (index := find_option(args, option)) is not None:
        first = take_value(args, option)
        assert first is not None, "the option was found"
        values.append(first)
        while index < len(args) and not args[index].startswith("-") and not is_setting(args[index]):
            values.append(args.pop(index))
    return values


def find_option(args: list[str], option: str) -> int | None:
    matches = (
        index for index, arg in enumerate(args) if arg == option or arg.startswith(f"{option}=")
    )
    return next(matches, None)


def take_number(args: list[str], option: str, low: int, high: int | None = None) -> int | None:
    """The value of an option that takes a whole number from `low` to `high`."""
    text = take_value(args, option)
    if text is None:
        return None
    is_number = text.isascii() and text.isdigit() and len(text) < 19
    if not is_number or int(text) < low or (high is not None and int(text) > high):
        limits = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{option} takes a whole number {limits}, not {text!r}")
    return int(text)


def take_positive(args: list[str], option: str, allow_infinite: bool = False) -> float | None:
    """The value of an option that takes a number above 0, or `inf` if that is allowed."""
    text = take_value(args, option)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0 or (math.isinf(value) and not allow_infinite):
        limits = " or inf" if allow_infinite else ""
        raise ConfigError(f"{option} takes a number above 0{limits}, not {text!r}")
    return value


def take_range(args: list[str], option: str) -> tuple[int, int] | None:
    """The value of an option that takes a whole number above 0, or two of them as LOW-HIGH."""
    text = take_value(args, option)
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise ConfigError(f"{option} takes a number or a range such as 64-1024, not {text!r}")
    return low, high


def take_adapter(args: list[str]) -> list[str]:
    """Remove `--adapter DIR` from the arguments and return the setting that it stands for."""
    folder = take_value(args, "--adapter")
    return [] if folder is None else [f"lora_input_adapters_path={folder}"]


def take_force(args: list[str]) -> list[str]:
    """Remove `--force` from the arguments and return the setting that it stands for."""
    return ["check_memory=false"] if take_flag(args, "--force") else []


def take_option(args: list[str], option: str, choices: tuple[str, ...]) -> str | None:
    """The value of an option that takes one of `choices`."""
    value = take_value(args, option)
    if value is not None and value not in choices:
        raise ConfigError(f"{option} takes {' or '.join(choices)}, not {value!r}")
    return value
