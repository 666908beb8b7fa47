"""Counts the collectives of a compiled program and their bytes, from its HLO text.

Bytes are those of the results on one device. A loop counts by its known_trip_count, or else by the
limit in its condition on a counter that starts at zero; a loop with neither counts once.
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
# An asynchronous collective counts at its -done; the type of an all-gather-start also has operands.
COLLECTIVE = re.compile(rf" ({'|'.join(KINDS)})(?:-done)?\(")
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
CONDITION = re.compile(r"condition=%?([\w.\-]+)")
BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
CONSTANT = re.compile(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
LESS_THAN = re.compile(r"ROOT .* compare\([^,]*%[\w.\-]+, [^,]*?%([\w.\-]+)\), direction=LT")
ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,<=]*)\]")
BITS = {"pred": 8, "token": 0}


@dataclass(frozen=True)
class Collective:
    kind: str
    count: int
    bytes: int


def count_collectives(hlo: str) -> list[Collective]:
    """Count and bytes of each kind of collective in one run of a compiled module."""
    entry, computations = parse(hlo)
    runs = dict.fromkeys(computations, 0)
    runs[entry] = 1
    for name in callers_first(entry, computations):
        for callee, trip_count in computations[name].calls:
            runs[callee] = runs.get(callee, 0) + runs[name] * trip_count
    counts = dict.fromkeys(KINDS, 0)
    nbytes = dict.fromkeys(KINDS, 0)
    for name, computation in computations.items():
        for kind, size in computation.collectives:
            counts[kind] += runs[name]
            nbytes[kind] += runs[name] * size
    return [Collective(kind, counts[kind], nbytes[kind]) for kind in KINDS if counts[kind]]


@dataclass
class Computation:
    calls: list[tuple[str, int]]  # computations and trip counts
    collectives: list[tuple[str, int]]  # kinds and bytes
    limit: int | None = None  # of the counter, if this is the condition of a loop


def parse(hlo: str) -> tuple[str, dict[str, Computation]]:
    """The name of the entry computation, and all computations by name."""
    entry, current = "", ""
    computations: dict[str, Computation] = {}
    constants: dict[str, int] = {}
    for line in hlo.splitlines():
        header = COMPUTATION.match(line)
        if header:
            current = header[2]
            computations[current] = Computation([], [])
            entry = current if header[1] else entry
            constants = {}
        elif current and " = " in line:
            computation = computations[current]
            constants |= {name: int(value) for name, value in CONSTANT.findall(line)}
            less_than = LESS_THAN.search(line)
            if less_than:
                computation.limit = constants.get(less_than[1])
            computation.calls += calls_of(line, computations)
            collective = COLLECTIVE.search(line)
            if collective:
                result_type = line[line.index(" = ") : collective.start()]
                computation.collectives.append((collective[1], array_bytes(result_type)))
    return entry, computations


def calls_of(line: str, computations: dict[str, Computation]) -> Iterator[tuple[str, int]]:
    """The computations that an instruction runs, with trip counts."""
    if re.search(r" async-(?:update|done)\(", line):
        return  # they repeat the computation of the async-start
    known, condition = TRIP_COUNT.search(line), CONDITION.search(line)
    trip_count = int(known[1]) if known else 1
    if not known and condition and condition[1] in computations:
        trip_count = computations[condition[1]].limit or 1
    for name in CALLED.findall(line):
        yield name, trip_count
    for group in BRANCHES.findall(line):
        for name in group.split(","):
            yield name.strip().lstrip("%"), 1


def callers_first(entry: str, computations: dict[str, Computation]) -> list[str]:
    """The computations reachable from the entry, in topological order."""
    order: list[str] = []
    visited: set[str] = set()

    def visit(name: str) -> None:
        if name in visited or name not in computations:
            return
        visited.add(name)
        for callee, _ in computations[name].calls:
            visit(callee)
        order.append(name)

    visit(entry)
    return order[::-1]


def array_bytes(types: str) -> int:
    """Bytes of all arrays in an HLO type, which may be a tuple."""
    total = 0
    for dtype, dims in ARRAY.findall(types):
        count = 1
        for dim in dims.split(","):
            count *= int(dim.lstrip("<=")) if dim else 1
        total += -(-count * element_bits(dtype) // 8)
    return total


def element_bits(dtype: str) -> int:
    """Bits of one element of f32, bf16, s4, f8e4m3fn, pred …"""
    if dtype in BITS:
        return BITS[dtype]
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 0
