"""What the words after a verb mean: an optional FILE, then key=value words, and the verb's own options."""

from maxtext.common.errors import ConfigError


def split(words: list[str]) -> tuple[str | None, list[str]]:
    """(FILE or None, key=value words)."""
    options = [word for word in words if word.startswith("-")]
    if options:
        raise ConfigError(f"unknown option {options[0]!r}; settings are written key=value, without dashes")
    if words and "=" not in words[0]:
        return words[0], words[1:]
    return None, words


def take_flag(words: list[str], flag: str) -> bool:
    """Remove a flag from the words and say whether it was there."""
    present = flag in words
    while flag in words:
        words.remove(flag)
    return present


def take_value(words: list[str], option: str) -> str | None:
    """Remove `--option value` or `--option=value` from the words and return the value."""
    for place, word in enumerate(words):
        if word == option or word.startswith(f"{option}="):
            inline = "=" in word
            value = word.partition("=")[2] if inline else "".join(words[place + 1 : place + 2])
            del words[place : place + (1 if inline else 2)]
            if not value or value.startswith("-"):
                raise ConfigError(f"{option} needs a value")
            return value
    return None


def take_option(words: list[str], option: str, choices: tuple[str, ...]) -> str | None:
    """The value of an option that takes one of `choices`."""
    value = take_value(words, option)
    if value is not None and value not in choices:
        raise ConfigError(f"{option} takes {' or '.join(choices)}, not {value!r}")
    return value
