"""The book of pages with random requests, against a slow book of dicts and scans that has the rules
in plain words.
"""

import random
from dataclasses import dataclass, field

import pytest

from tests.inference.test_pages import book


@dataclass
class Known:
    page: int | None  # None: in host memory
    used: int = 0
    snapshot: object = None


@dataclass
class Slow:
    """Prefixes in a dict, and scans over all of them."""

    count: int
    size: int
    most_idle: int
    most_hosted: int
    snapshots: bool
    known: dict = field(default_factory=dict)  # prefix -> Known
    holders: dict = field(default_factory=dict)  # page -> how many
    time: int = 0

    def named(self):
        return {each.page for each in self.known.values() if each.page is not None}

    def unused(self):
        return set(range(self.count)) - self.named() - set(self.holders)

    def idle(self):
        return [
            name
            for name, each in self.known.items()
            if each.page is not None and each.page not in self.holders
        ]

    def hosted(self):
        return [name for name, each in self.known.items() if each.page is None]

    def beneath(self, name, param_infos):
        return [
            other for other in param_infos if len(other) > len(name) and other[: len(name)] == name
        ]

    def give_up(self):
        on_device = [name for name in self.known if self.known[name].page is not None]
        idle = sorted(self.idle(), key=lambda name: self.known[name].used)
        ends = [name for name in idle if not self.beneath(name, on_device)]
        if not ends or not self.most_hosted:
            self.forget((ends or idle)[0])
            return
        if len(self.hosted()) == self.most_hosted:
            lowest = [name for name in self.hosted() if not self.beneath(name, self.hosted())]
            self.forget(min(lowest, key=lambda name: self.known[name].used))
        self.known[ends[0]].page = None

    def forget(self, name):
        for each in [name, *self.beneath(name, self.known)]:
            del self.known[each]

    def room(self, count):
        while len(self.unused()) < count:
            self.give_up()

    def hold(self, page):
        self.holders[page] = self.holders.get(page, 0) + 1

    def take(self, count):
        """Whether it can be done; what is taken is up to the book, among the unused."""
        if count > self.count - len(self.holders):
            return False
        self.room(count)
        return True

    def give(self, pages):
        for page in reversed(pages):
            self.holders[page] -= 1
            if not self.holders[page]:
                del self.holders[page]
                self.time += 1
                for each in self.known.values():
                    if each.page == page:
                        each.used = self.time
        while len(self.idle()) > self.most_idle:
            self.give_up()

    def prefixes(self, tokens, end):
        return [tuple(tokens[:stop]) for stop in range(self.size, end + 1, self.size)]

    def match(self, tokens, written):
        """The prefixes that are held then, whether or not they end in a snapshot; `written`: the
        pages brought back.
        """
        names = []
        for name in self.prefixes(tokens, len(tokens) - 1):
            if name not in self.known:
                break
            names.append(name)
        held, written = [], list(written)
        for name in self.ending(names):
            each = self.known.get(name)
            if each is None or (each.page is None and len(self.holders) == self.count):
                break
            if each.page is None:
                del self.known[name]  # it is on its way, and no longer in host memory
                self.room(1)
                each.page = written.pop(0)
                assert each.page in self.unused()
                self.known[name] = each
            self.hold(each.page)
            held.append(name)
        assert not written
        return held

    def ending(self, names):
        while self.snapshots and names and self.known[names[-1]].snapshot is None:
            names = names[:-1]
        return names

    def learn(self, tokens, pages, snapshot):
        if not self.most_idle and not self.most_hosted:
            return
        names = self.prefixes(tokens, len(tokens))
        for name, page in zip(names, pages, strict=False):
            each = self.known.setdefault(name, Known(None))
            if each.page not in self.holders:
                each.page = page
        if snapshot is not None and self.known[names[-1]].snapshot is None:
            self.known[names[-1]].snapshot = snapshot


@dataclass(eq=False)
class Request:
    tokens: list
    table: list


SETTINGS = [
    dict(known=0),
    dict(known=3),
    dict(known=24),
    dict(known=6, host=4),
    dict(known=24, host=40),
    dict(known=0, host=5),
    dict(known=5, snapshots=True),
    dict(known=8, host=8, snapshots=True),
]


@pytest.mark.parametrize(
    "settings", SETTINGS, ids=lambda settings: "-".join(map(str, settings.values()))
)
@pytest.mark.parametrize("seed", range(2))
def test_random_requests(settings, seed):
    generator, count, size = random.Random(seed), (24, 12)[seed % 2], 2
    pages, pool = book(count, size, **settings)
    slow = Slow(
        count,
        size,
        settings.get("known"),
        settings.get("host", 0),
        settings.get("snapshots", False),
    )
    requests: list[Request] = []
    reused = failed = 0

    def compute(request, start):
        for place in range(start, len(request.table)):
            pool.contents[request.table[place]] = tuple(request.tokens[: (place + 1) * size])

    def took(wanted):
        nonlocal failed
        possible = slow.take(wanted)
        got = pages.take(wanted)
        assert (got is not None) == possible
        if got is None:
            failed += 1
            return None
        assert len(got) == len(set(got)) == wanted
        assert set(got) <= slow.unused()
        for page in got:
            slow.hold(page)
            pool.contents[page] = "old"
        return got

    def gave(table):
        pages.give(table)
        slow.give(table)

    def start():
        nonlocal reused
        beginning = (
            generator.choice(requests).tokens if requests and generator.random() < 0.5 else []
        )
        cut = generator.randint(0, len(beginning))
        tokens = [
            *beginning[:cut],
            *(generator.randint(0, 1) for _ in range(generator.randint(0, 6))),
        ]
        hits, misses = pages.hits, pages.misses
        pool.writes.clear()
        match = pages.match(tokens)
        held = slow.match(tokens, pool.writes)
        kept = slow.ending(held)
        assert match.length == len(kept) * size == len(match.pages) * size
        assert (pages.hits - hits, pages.misses - misses) == (
            match.length,
            len(tokens) - match.length,
        )
        assert match.pages == [slow.known[name].page for name in kept]
        assert [pool.contents[page] for page in match.pages] == kept
        assert match.snapshot == (kept[-1] if kept and slow.snapshots else None)
        slow.give([slow.known[name].page for name in held[len(kept) :]])
        reused += match.length
        rest = took(-(-len(tokens) // size) - len(match.pages))
        if rest is None:
            gave(match.pages)
            return
        request = Request(tokens, match.pages + rest)
        compute(request, len(match.pages))
        requests.append(request)

    def go_on():
        request = generator.choice(requests)
        new = [generator.randint(0, 1) for _ in range(generator.randint(1, 3))]
        more = took(-(-(len(request.tokens) + len(new)) // size) - len(request.table))
        if more is not None:
            whole = len(request.tokens) // size
            request.tokens.extend(new)
            request.table.extend(more)
            compute(request, whole)

    def learn():
        request = generator.choice(requests)
        end = (
            generator.randint(0, len(request.tokens))
            if generator.random() < 0.3
            else len(request.tokens)
        )
        tokens = request.tokens[:end]
        whole = tuple(tokens[: end // size * size])
        snapshot = whole if whole and slow.snapshots and generator.random() < 0.5 else None
        pages.learn(tokens, request.table, snapshot)
        slow.learn(tokens, request.table, snapshot)

    def finish():
        request = requests.pop(generator.randrange(len(requests)))
        if generator.random() < 0.8:
            gave(request.table)
        else:  # in any order, and not all at once
            generator.shuffle(request.table)
            for page in request.table:
                gave([page])

    for _ in range(3000):
        choices = [start, start] if len(requests) < 8 else []
        if requests:
            choices += [go_on, go_on, learn, learn, finish]
        generator.choice(choices)()
        pages.check()
        for request in requests:
            for place in range(len(request.tokens) // size):
                assert pool.contents[request.table[place]] == tuple(
                    request.tokens[: (place + 1) * size]
                )
        assert pages.held == len(slow.holders)
        assert pages.free == count - len(slow.holders)
        assert pages.known_on_device == len(slow.named())
        assert pages.known_on_host == len(slow.hosted())
    assert failed > 20
    assert (reused > 500) == (settings["known"] + settings.get("host", 0) > 0)
    for request in requests:
        pages.give(request.table)
    pages.check()
    assert pages.free == count
