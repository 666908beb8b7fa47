"""What a compiled program sends between devices, read from its text: how often in one run, and how
many bytes.

Bytes are those of the results on one device. A loop that says how often it runs counts so often, or
else as often as its condition lets a counter grow by one from zero; one that tells neither counts
once.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)
# A collective in two parts has its result at the end; the start of an all-gather also names its
# operands.
COLLECTIVE = re.compile(rf" ({'|'.join(KINDS)})(?:-done)?\(")
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
CONDITION = re.compile(r"condition=%?([\w.\-]+)")
BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
CONSTANT = re.compile(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
BELOW = re.compile(r"ROOT .* compare\([^,]*%[\w.\-]+, [^,]*?%([\w.\-]+)\), direction=LT")
ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,<=]*)\]")
BITS = {"pred": 8, "token": 0}


@dataclass(frozen=True)
class Collective:
    kind: str
    count: int
    bytes: int


def collectives(text: str) -> list[Collective]:
    """By kind, of the text of a compiled module."""
    entry, computations = parse(text)
    times = dict.fromkeys(computations, 0)
    times[entry] = 1
    for name in callers_first(entry, computations):
        for called, trips in computations[name].calls:
            times[called] = times.get(called, 0) + times[name] * trips
    totals: dict[str, list[int]] = {}
    for name, computation in computations.items():
        for kind, size in computation.sends:
            total = totals.setdefault(kind, [0, 0])
            total[0] += times[name]
            total[1] += times[name] * size
    return [Collective(kind, *totals[kind]) for kind in KINDS if totals.get(kind, [0])[0]]


@dataclass
class Computation:
    calls: list[tuple[str, int]]  # what it runs, and how often
    sends: list[tuple[str, int]]  # kinds and bytes
    limit: int | None = None  # of the counter, if it is the condition of a loop


def parse(text: str) -> tuple[str, dict[str, Computation]]:
    entry, current = "", ""
    found: dict[str, Computation] = {}
    constants: dict[str, int] = {}
    for line in text.splitlines():
        start = COMPUTATION.match(line)
        if start:
            current = start[2]
            found[current] = Computation([], [])
            entry = current if start[1] else entry
            constants = {}
        elif current and " = " in line:
            constants |= {name: int(value) for name, value in CONSTANT.findall(line)}
            below = BELOW.search(line)
            if below:
                found[current].limit = constants.get(below[1])
            found[current].calls += calls(line, found)
            sent = COLLECTIVE.search(line)
            if sent:
                found[current].sends.append(
                    (sent[1], array_bytes(line[line.index(" = ") : sent.start()]))
                )
    return entry, found


def calls(line: str, before: dict[str, Computation]) -> Iterator[tuple[str, int]]:
    if re.search(r" async-(?:update|done)\(", line):
        return  # they name again what the start runs
    trips, condition = TRIPS.search(line), CONDITION.search(line)
    often = int(trips[1]) if trips else 1
    if not trips and condition and condition[1] in before:
        often = before[condition[1]].limit or 1
    for name in CALLED.findall(line):
        yield name, often
    for group in BRANCHES.findall(line):
        for name in group.split(","):
            yield name.strip().lstrip("%"), 1


def callers_first(entry: str, computations: dict[str, Computation]) -> list[str]:
    """Every computation that the entry reaches, after all that call it."""
    order: list[str] = []
    done: set[str] = set()

    def visit(name: str) -> None:
        if name in done or name not in computations:
            return
        done.add(name)
        for called, _ in computations[name].calls:
            visit(called)
        order.append(name)

    visit(entry)
    return order[::-1]


def array_bytes(types: str) -> int:
    """Of all arrays in the text of a type, which may be a tuple's."""
    total = 0
    for element, sizes in ARRAY.findall(types):
        count = 1
        for size in sizes.split(","):
            count *= int(size.lstrip("<=")) if size else 1
        total += -(-count * bits(element) // 8)
    return total


def bits(element: str) -> int:
    """Of one element: f32, bf16, s4, f8e4m3fn, pred …"""
    if element in BITS:
        return BITS[element]
    digits = re.search(r"\d+", element)
    return int(digits[0]) if digits else 0
