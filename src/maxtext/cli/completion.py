"""`maxtext completion bash|zsh|fish`: prints a script for the shell, which asks this program
for the arguments that may follow.

`maxtext completion candidates ARG ...` prints them, for the last one. Only the standard library
is imported, except for the values of a key, since a shell waits.
"""

import re
from pathlib import Path

from maxtext.cli.arguments import Arguments
from maxtext.cli.commands import COMMANDS

CONFIGS = Path(__file__).parents[1] / "configs"
BASH = r"""
# maxtext completion for bash; in ~/.bashrc: source <(maxtext completion bash)
_maxtext() {
    # The line is split here, since bash splits words at = too.
    local line="${COMP_LINE:0:COMP_POINT}" words cur
    read -ra words <<< "$line"
    [[ "$line" == *[[:space:]] ]] && words+=("")
    cur="${words[-1]}"
    COMPREPLY=()
    local candidate
    while IFS= read -r candidate; do
        [[ "$cur" == *=* ]] && candidate="${candidate#*=}"
        COMPREPLY+=("$candidate")
    done < <(maxtext completion candidates "${words[@]:1}" 2>/dev/null)
    if [[ ${#words[@]} -gt 2 && "$cur" != -* && "$cur" != *=* ]]; then
        local file
        while IFS= read -r file; do COMPREPLY+=("$file"); done < <(compgen -f -- "$cur")
    fi
    [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *= ]] && compopt -o nospace
}
complete -o default -F _maxtext maxtext
"""
ZSH = r"""
#compdef maxtext
# maxtext completion for zsh; in ~/.zshrc, after compinit: source <(maxtext completion zsh)
_maxtext() {
    local -a candidates
    candidates=(${(f)"$(maxtext completion candidates "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    compadd -S '' -- ${(M)candidates:#*=}
    compadd -- ${candidates:#*=}
    (( CURRENT > 2 )) && [[ ${words[CURRENT]} != (-*|*=*) ]] && _files
    return 0
}
compdef _maxtext maxtext
"""
FISH = r"""
# maxtext completion for fish; in ~/.config/fish/config.fish: maxtext completion fish | source
function __maxtext_candidates
    set -l words (commandline -opc) (commandline -ct)
    maxtext completion candidates $words[2..-1] 2>/dev/null
end
complete -c maxtext -n 'test (count (commandline -opc)) -eq 1' -f
complete -c maxtext -a '(__maxtext_candidates)'
"""
SHELLS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def run(arguments: Arguments) -> int:
    if arguments.task == "candidates":
        for candidate in candidates(arguments.args or [""]):
            print(candidate)
    else:
        print(SHELLS[arguments.task].strip())
    return 0


def candidates(args: list[str]) -> list[str]:
    """The arguments that the last one may become, after those before it."""
    *before, current = args
    if not before:
        names = list(COMMANDS)
    elif before[0] not in COMMANDS:
        names = []
    elif current.startswith("-"):
        names = options(*before[:2])
    elif choices := option_choices(before):
        names = choices
    elif "=" in current:
        key = current.partition("=")[0]
        names = [f"{key}={value}" for value in values(key)]
    elif len(before) == 1 and (names := subcommands(before[0])):
        names += presets() if before[0] == "config" else []
    else:
        names = [*presets(), *models(), *(f"{key}=" for key in keys() if current)]
    return [name for name in names if name.startswith(current)]


def options(command: str, task: str = "") -> list[str]:
    """The options of a task of the command, or of all its tasks."""
    forms = COMMANDS[command].forms
    chosen = [forms[task]] if task in forms else list(forms.values())
    rows = [option for form in chosen for option in form.options if not option.refusal]
    return sorted({"--help", "--debug", *(row.name for row in rows)})


def option_choices(before: list[str]) -> list[str]:
    """The values of the option that is the last argument."""
    forms = COMMANDS[before[0]].forms
    rows = [row for form in forms.values() if (row := form.find(before[-1])) is not None]
    return list(rows[0].type.choices) if rows else []


def subcommands(command: str) -> list[str]:
    return [task for task in COMMANDS[command].forms if task]


def presets() -> list[str]:
    return sorted(path.stem for path in CONFIGS.glob("*.yml"))


def models() -> list[str]:
    return sorted(path.stem for path in (CONFIGS / "models").glob("*.yml"))


def keys() -> list[str]:
    text = (CONFIGS / "base.yml").read_text(encoding="utf-8")
    return re.findall(r"^(\w+):", text, re.MULTILINE)


def values(key: str) -> list[str]:
    """The values of a key that has a fixed set of them."""
    from maxtext.configs import fields

    if key not in fields.KEYS:
        return []
    return ["true", "false"] if bool in fields.members(key) else fields.choices(key)
