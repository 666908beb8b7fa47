"""The structure of the package: layered imports without cycles, and short functions."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import maxtext
from tests.support.rooms import LEVEL

PACKAGE = Path(maxtext.__file__).parent
# Modules beside the rooms: the package itself and the doors for familiar commands.
DOORS = {
    "__init__",
    "__main__",
    "train",
    "decode",
    "losses",
    "rewards",
    "sft_trainer",
    "train_compile",
    "tune",
    "standalone_dataloader",
}


def imported_rooms(path: Path):
    """(line, room) of every import of one of our rooms, also those inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: imports are absolute here"
            modules = [node.module or ""]
            if node.module == "maxtext":
                modules = [f"maxtext.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        for module in modules:
            parts = module.split(".")
            if parts[0] == "maxtext" and len(parts) > 1:
                yield node.lineno, parts[1]


def test_every_folder_is_a_room_and_every_module_a_door():
    assert {
        path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"
    } <= set(LEVEL)
    assert {path.stem for path in PACKAGE.glob("*.py")} <= DOORS


def test_rooms_import_only_what_is_below_them():
    wrong = []
    for room, level in LEVEL.items():
        for path in (PACKAGE / room).rglob("*.py"):
            for line, other in imported_rooms(path):
                if other != room and LEVEL.get(other, 99) >= level:
                    wrong.append(f"{path.relative_to(PACKAGE)}:{line} imports {other}")
    assert not wrong


def test_configurations_are_checked_against_their_layers():
    """`configs.load.load` alone does not know the layers: `models.configuration.load` does."""
    bypassing = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        and node.module in ("maxtext.configs", "maxtext.configs.load")
        and "load" in {alias.name for alias in node.names}
    ]
    assert bypassing == ["models/configuration.py"]


def test_only_sharding_says_partition_spec():
    said = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "PartitionSpec" in path.read_text() and "sharding" not in path.relative_to(PACKAGE).parts
    ]
    assert not said


# A key is declared inside the settings that its conditions read.
KEYS_AND_SETTINGS = ("maxtext.configs.types.key", "maxtext.configs.types")


def module_files() -> dict[str, Path]:
    """The file of every module of the package, by its dotted name."""
    modules = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def run_time_imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports below a node, also those inside functions, but not those for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for statement in child.orelse:
                yield from run_time_imports(statement)
        else:
            yield from run_time_imports(child)


def imported_modules(
    path: Path, modules: dict[str, Path], with_types: bool = False
) -> Iterator[str]:
    """`with_types`: imports for type checkers as well."""
    tree = ast.parse(path.read_text())
    imports = (
        (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
        if with_types
        else run_time_imports(tree)
    )
    for statement in imports:
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                submodule = f"{statement.module}.{alias.name}"
                yield submodule if submodule in modules else statement.module or ""
        else:
            yield from (alias.name for alias in statement.names)


def test_modules_import_each_other_in_one_direction():
    """Also for type checkers: two modules that need each other's types are one."""
    modules = module_files()
    graph = {
        name: {
            other
            for other in imported_modules(path, modules, with_types=True)
            if other in modules and (name, other) != KEYS_AND_SETTINGS
        }
        - {name}
        for name, path in modules.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_inner_rooms_of_inference_import_what_is_below_them():
    """Sampling knows no sequences, the engine no text, and the text no server."""
    order = ("sampling", "engine", "text", "evaluation", "server")
    modules = module_files()
    wrong = []
    for name, path in modules.items():
        parts = name.split(".")
        if parts[:2] != ["maxtext", "inference"] or len(parts) < 3 or parts[2] not in order:
            continue
        above = order[order.index(parts[2]) + 1 :]
        for other in imported_modules(path, modules):
            if (
                other.split(".")[:2] == parts[:2]
                and other.split(".")[2:3]
                and (other.split(".")[2] in above)
            ):
                wrong.append(f"{name} imports {other}")
    assert not wrong


def test_only_commands_import_the_server():
    """Trainers parse tool calls and reasoning with `inference/text/parsers`, without HTTP."""
    modules = module_files()
    server = "maxtext.inference.server"
    importing = [
        name
        for name, path in modules.items()
        if not name.startswith((server, "maxtext.cli"))
        and any(other.startswith(server) for other in imported_modules(path, modules))
    ]
    assert not importing


def test_functions_have_at_most_80_lines():
    long = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno + 1 > 80
    ]
    assert not long


def test_files_have_at_most_500_lines():
    long = [
        f"{path.relative_to(PACKAGE)}: {count} lines"
        for path in PACKAGE.rglob("*.py")
        if (count := len(path.read_text().splitlines())) > 500
    ]
    assert not long


def test_doors_are_thin():
    thick = [path.name for path in PACKAGE.glob("*.py") if len(path.read_text().splitlines()) > 40]
    assert not thick
