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
# The changelog also names files of earlier versions.
CURRENT_PAGES = [page for page in PAGES if page.name != "CHANGELOG.md"]
WRITTEN_BY_A_RUN = {"run/config.yml"}
CODE_FOLDERS = "src|tests|benchmarks|docs|examples|deploy"
DRAW_ROOMS = ROOT / "docs" / "draw_rooms.py"


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
    """The file of this path, or the first that a pattern matches, in the package or the repository;
    a bare name is that of a file in any folder.
    """
    patterns = [(PACKAGE, path), (ROOT, path)]
    if "/" not in path:
        patterns = [(ROOT / folder, f"**/{path}") for folder in ("src", "tests", "benchmarks")]
    files = (file for root, pattern in patterns for file in root.glob(pattern) if file.is_file())
    return next(files, None)


def is_missing(path: str, name: str) -> bool:
    file = find_file(path)
    return file is None or (bool(name) and name not in definitions(file))


@pytest.mark.parametrize("page", CURRENT_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_and_functions_exist(page):
    text = page.read_text()
    # A whole code span: `layers/cache.py:PagedKVCache.update`, `tests/sharding/test_layouts_*.py`.
    references = re.findall(r"`((?:\w+/)+[\w*]+\.(?:py|yml))(?::([\w.]+))?`", text)
    references += re.findall(r"`(\w+\.py)()`", text)
    # A path from the root of the repository, anywhere: python benchmarks/rl.py --no-peer.
    references += re.findall(rf"(?<![\w/.])((?:{CODE_FOLDERS})/[\w*/.]*\w\.(?:py|yml|md))()", text)
    missing = [":".join(reference) for reference in references if is_missing(*reference)]
    assert set(missing) <= {f"{path}:" for path in WRITTEN_BY_A_RUN}


def test_architecture_and_contributing_name_many_files():
    for page in (ARCHITECTURE, CONTRIBUTING):
        assert len(re.findall(r"`(?:\w+/)+\w+\.py", page.read_text())) > 20


def load_draw_rooms():
    spec = importlib.util.spec_from_file_location("draw_rooms", DRAW_ROOMS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_picture_of_the_rooms_is_fresh():
    """Rooms and arrows are equal; numbers of lines, and the colors by them, may be 10% old."""
    count = re.compile(r'>([\d,]+) lines<|fill="#[0-9a-f]{6}"')
    draw_rooms = load_draw_rooms()
    imports, lines = draw_rooms.read_rooms()
    drawn = draw_rooms.PICTURE.read_text()
    assert count.sub("", drawn) == count.sub("", draw_rooms.draw(imports, lines)), (
        "run python docs/draw_rooms.py"
    )
    drawn_lines = re.findall(r">(\w+)</text>.*?>([\d,]+) lines<", drawn)
    assert {room: int(count.replace(",", "")) for room, count in drawn_lines} == pytest.approx(
        lines, rel=0.1
    )


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
