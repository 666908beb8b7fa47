"""The documents name files, functions and implementations that exist, and their links resolve."""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

import maxtext
from maxtext.layers.attention import ATTENTIONS
from maxtext.layers.decoder_layer import BLOCKS
from maxtext.layers.linear import LINEARS
from maxtext.layers.mlp import MLPS
from maxtext.models.head_loss import HEAD_LOSSES
from tests.support.rooms import LEVEL

PACKAGE = Path(maxtext.__file__).parent
ROOT = Path(__file__).parents[1]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
)


@cache
def definitions(path: Path) -> frozenset[str]:
    """The functions, classes and methods ("Class.method") that a file defines."""
    names = set()
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, functions | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (child for child in node.body if isinstance(child, functions))
            names |= {f"{node.name}.{method.name}" for method in methods}
    return frozenset(names)


def find_file(path: str) -> Path | None:
    return next((root / path for root in (PACKAGE, ROOT) if (root / path).is_file()), None)


@pytest.mark.parametrize("page", [ARCHITECTURE, CONTRIBUTING], ids=lambda page: page.name)
def test_named_files_and_functions_exist(page):
    references = re.findall(r"`((?:\w+/)+\w+\.(?:py|yml))(?::([\w.]+))?`", page.read_text())
    assert references
    missing = []
    for path, name in references:
        file = find_file(path)
        if file is None or (name and name not in definitions(file)):
            missing.append(f"{path}:{name}" if name else path)
    assert not missing


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_programs_import_names_that_exist(folder):
    missing = []
    for path in sorted((ROOT / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                "maxtext"
            ):
                continue
            module = importlib.import_module(node.module)
            missing += [
                f"{path.name}: {node.module}.{alias.name}"
                for alias in node.names
                if not hasattr(module, alias.name)
                and importlib.util.find_spec(f"{node.module}.{alias.name}") is None
            ]
    assert not missing


def test_architecture_lists_every_room_at_its_level():
    rows = re.findall(r"^\| (\d) \| ([^|]+) \|", ARCHITECTURE.read_text(), re.MULTILINE)
    rooms = {room: int(level) for level, names in rows for room in re.findall(r"`(\w+)/`", names)}
    assert rooms == LEVEL


def test_architecture_lists_every_implementation():
    text = ARCHITECTURE.read_text()
    tables = (BLOCKS, ATTENTIONS, MLPS, LINEARS, HEAD_LOSSES)
    names = [implementation.__name__ for table in tables for implementation in table]
    assert [name for name in names if f"`{name}`" not in text] == []


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, as GitHub derives them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    broken = []
    for link in links:
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (fragment and fragment not in anchors(target)):
            broken.append(link)
    assert not broken


def test_every_page_is_linked_from_the_readme():
    readme = (ROOT / "README.md").read_text()
    pages = [page.name for page in (ROOT / "docs").glob("*.md")]
    assert [name for name in pages if f"docs/{name}" not in readme] == []
