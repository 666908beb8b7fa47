"""Draws docs/images/rooms.svg from the imports: the rooms of the package, each above all rooms that
it imports. An arrow leads from a room to one that it imports, unless a longer way leads there.

    python docs/draw_rooms.py
"""

import ast
import graphlib
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "maxtext"
PICTURE = Path(__file__).parent / "images" / "rooms.svg"
WIDTH, ROW, BOX_WIDTH, BOX_HEIGHT = 860, 84, 150, 46
COLORS = ("#e8eefb", "#dfe9f8", "#d3e3f6", "#c8ddf3")


def imported_rooms(path: Path) -> set[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return {parts[1] for name in names if (parts := name.split("."))[0] == "maxtext" and parts[1:]}


def read_rooms() -> tuple[dict[str, set[str]], dict[str, int]]:
    """The rooms that each room imports, and their lines."""
    files = {
        folder.name: sorted(folder.rglob("*.py"))
        for folder in sorted(PACKAGE.iterdir())
        if (folder / "__init__.py").exists()
    }
    imports = {
        room: set().union(*map(imported_rooms, paths)) & files.keys() - {room}
        for room, paths in files.items()
    }
    lines = {
        room: sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
        for room, paths in files.items()
    }
    return imports, lines


def floors(imports: dict[str, set[str]]) -> dict[str, int]:
    """The length of the longest chain of imports below each room."""
    floor: dict[str, int] = {}
    for room in graphlib.TopologicalSorter(imports).static_order():
        floor[room] = max((floor[other] + 1 for other in imports[room]), default=0)
    return floor


def reachable(imports: dict[str, set[str]], room: str) -> set[str]:
    return imports[room].union(*(reachable(imports, other) for other in imports[room]))


def direct_imports(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """The imports of each room that no longer way leads to."""
    return {
        room: others - set().union(*(reachable(imports, other) for other in others))
        for room, others in imports.items()
    }


def arrow(start: tuple[float, float], end: tuple[float, float], num_floors: int) -> str:
    """Of more than one floor: in a curve from the left side, around the rooms between."""
    (x1, y1), (x2, y2) = start, end
    y2 -= BOX_HEIGHT / 2
    if num_floors == 1:
        way = f"M{x1:.0f} {y1 + BOX_HEIGHT / 2:.0f} L{x2:.0f} {y2:.0f}"
    else:
        x1 -= BOX_WIDTH / 2
        x = min(x1, x2) - 24 * num_floors
        way = f"M{x1:.0f} {y1:.0f} C{x:.0f} {y1 + 20:.0f} {x:.0f} {y2 - 60:.0f} {x2:.0f} {y2:.0f}"
    return f'<path d="{way}" stroke="#7a8aa5" fill="none" marker-end="url(#tip)"/>'


def draw(imports: dict[str, set[str]], lines: dict[str, int]) -> str:
    floor, direct = floors(imports), direct_imports(imports)
    top = max(floor.values())

    def is_near(room: str) -> bool:
        return any(floor[above] == floor[room] + 1 for above in direct if room in direct[above])

    center = {}
    for level in range(top + 1):
        row = sorted((room for room in imports if floor[room] == level), key=is_near)
        for index, room in enumerate(row):
            x = WIDTH * (index + 1) / (len(row) + 1)
            center[room] = (x, (top - level) * ROW + ROW / 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {(top + 1) * ROW}" '
        'font-family="sans-serif" text-anchor="middle">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="#7a8aa5"/></marker></defs>',
    ]
    for room, others in direct.items():
        for other in sorted(others):
            parts.append(arrow(center[room], center[other], floor[room] - floor[other]))
    for room, (x, y) in center.items():
        parts.append(
            f'<rect x="{x - BOX_WIDTH / 2:.0f}" y="{y - BOX_HEIGHT / 2:.0f}" rx="8" '
            f'width="{BOX_WIDTH}" height="{BOX_HEIGHT}" stroke="#56719c" '
            f'fill="{COLORS[min(lines[room] // 4000, 3)]}"/>'
            f'<text x="{x:.0f}" y="{y - 2:.0f}" font-size="16" fill="#1a2740">{room}</text>'
            f'<text x="{x:.0f}" y="{y + 15:.0f}" font-size="11" fill="#56719c">'
            f"{round(lines[room], -2):,} lines</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(*read_rooms()), encoding="utf-8")
    print(f"wrote {PICTURE}")
