"""`maxtext config`: shows the resolved configuration with its sources, and explains keys."""

import json
import sys

from maxtext.cli import positionals
from maxtext.cli.arguments import Arguments
from maxtext.common.errors import ConfigError
from maxtext.configs import fields, ledger, serialize, sources
from maxtext.configs.load import base_values
from maxtext.configs.rules.rule import RULES
from maxtext.configs.types import GROUPS, DerivedValues, MaxTextConfig, declaration, group_of


def run(arguments: Arguments) -> int:
    if arguments.task == "explain":
        return explain(arguments.args)
    if arguments.task == "status":
        return status()
    from maxtext.models.configuration import load

    style = arguments["--format"]
    path, overrides = positionals.split(arguments.all_args)
    config = load(path, overrides)
    keys = changed_keys(config) if arguments["--changed"] else serialize.KEYS_IN_ORDER
    if style == "json":
        attributes = serialize.hf_attributes(config)
        section = {"architecture": attributes} if attributes else {}
        print(
            json.dumps(
                {key: serialize.plain(getattr(config, key)) for key in keys} | section, indent=2
            )
        )
    elif style == "yaml":
        print(serialize.yaml_text(config, keys), end="")
    else:
        show(config, set(keys))
        print(serialize.yaml_text(config, ()).strip())
    return 0


def changed_keys(config: MaxTextConfig) -> list[str]:
    """The keys that differ from base.yml, without the computed ones."""
    base = base_values()
    computed = DerivedValues.model_fields
    return [
        key
        for key in serialize.KEYS_IN_ORDER
        if key not in computed and getattr(config, key) != getattr(base, key)
    ]


def show(config: MaxTextConfig, keys: set[str]) -> None:
    """Print the keys by group, each value with its source; in colour on a terminal."""
    colour = sys.stdout.isatty()
    bold, dim, end = ("\x1b[1m", "\x1b[2m", "\x1b[0m") if colour else ("", "", "")
    for group in GROUPS:
        chosen = [key for key in group.model_fields if key in keys]
        if not chosen:
            continue
        print(f"{bold}# {group.__name__}: {group.__doc__}{end}")
        for key in chosen:
            mark = "" if ledger.status(key).kind in ("acts", "computed") else ", does not act"
            first, *more = serialize.yaml_line(key, getattr(config, key)).splitlines()
            print(f"{first:<60}  {dim}# {config.source(key)}{mark}{end}")
            for line in more:
                print(line)
        print()


def explain(args: list[str]) -> int:
    from maxtext.models.configuration import load
    from maxtext.models.rules import layer_needs

    if not args or "=" in args[0]:
        raise ConfigError("name a key, e.g. maxtext config explain remat_policy")
    key = args[0]
    if key not in fields.KEYS:
        raise ConfigError(f"unknown key {key!r}{sources.suggest(key, fields.KEYS)}")
    path, overrides = positionals.split(args[1:])
    config = load(path, overrides)
    declared = declaration(key)
    choices = ", ".join(choice or "(empty)" for choice in declared.choices)
    default = base_values() if key not in DerivedValues.model_fields else None
    lines = {
        "group": group_of(key).__name__,
        "meaning": declared.meaning,
        "type": fields.describe(key) if not declared.choices else f"one of {choices}",
        "bounds": declared.bounds,
        "needs": "; and ".join([*RULES.needs(key, config), *layer_needs(config, key)]),
        "default": serialize.compact(getattr(default, key)) if default else "computed",
        "value": serialize.compact(getattr(config, key)),
        "source": str(config.source(key)),
        "status": str(ledger.status(key)),
    }
    print(key)
    for name, line in lines.items():
        if line or name in ("default", "value"):
            print(f"  {name:8} {line}")
    return 0


def status() -> int:
    kinds: dict[str, list[str]] = {"acts": [], "computed": [], "not_yet": [], "never": []}
    for key in serialize.KEYS_IN_ORDER:
        kinds[ledger.status(key).kind].append(key)
    count = {kind: len(keys) for kind, keys in kinds.items()}
    print(
        f"{len(fields.KEYS)} keys: {count['acts']} act, {count['computed']} are computed, "
        f"{count['not_yet']} do not act yet, {count['never']} do not act here"
    )
    titles = {
        "acts": "act",
        "computed": "are computed",
        "not_yet": "do not act yet",
        "never": "do not act here",
    }
    for kind, keys in kinds.items():
        by_reason: dict[str, list[str]] = {}
        for key in keys:
            by_reason.setdefault(ledger.status(key).reason, []).append(key)
        for reason, named in by_reason.items():
            print(f"\n# {len(named)} {titles[kind]}{': ' + reason if reason else ''}")
            for key in named:
                print(f"{key}")
    return 0
