"""Continuous batching: requests come and go while others are being extended.

Each `step` admits what there is room for, queues programs on the device, and tells what came of
those before: the device computes one block of tokens while the host looks at the last. A sequence
needs a slot, and pages for its tokens as it grows. When pages run out, the youngest sequence gives
its own back and waits; it is put in again later, prompt and new tokens together, and goes on as if
nothing had been, since a token depends on its own sequence alone.

Whole prompts are put in before others go on; with `chunk`, a piece at a time, between blocks of the
others.
"""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from maxtext.common.errors import UserError
from maxtext.inference.engine import (
    BLOCK,
    BROKEN,
    FIXED_STEPS,
    IDLE,
    MOST_ENDS,
    PACKED,
    Drawn,
    Engine,
    Prompts,
    Wishes,
)
from maxtext.inference.pages import Pages
from maxtext.inference.sampling import GREEDILY, Rows, Sampling, kind_of

PREFILL_TOKENS = PACKED  # in one program, at most, unless a single prompt has more
# In one row, at most; with the padding after them, powers of two. Attention does some work for each
# that is not there.
PACKED_PROMPTS = (7, 15, 31, 63)
SOME_ROWS = 8  # beside one and as many as there may be, where there are few programs
LEAST_WIDTH = 16  # of a prompt's row
LEAST_REACH = 64  # places that are looked at
LEAST_STEPS = 4  # of a block that is cut short since others wait
BLOCK_SECONDS = 0.1  # a block has as many tokens as fit, so that text flows on slow machines


@dataclass(frozen=True)
class Request:
    ids: tuple[int, ...]  # the prompt
    count: int  # new tokens at most
    sampling: Sampling = GREEDILY
    seed: int = 0
    ends: tuple[int, ...] = ()  # ids that end it; the one that does is its last token
    log_probs: bool = False


@dataclass(frozen=True)
class News:
    """What is new of a request: tokens, and how it finished, if it did: end, length or error."""

    number: int
    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    finished: str | None = None
    error: str | None = None


@dataclass(eq=False)
class Work:
    """A request on its way."""

    number: int
    request: Request
    ids: list[int]  # the prompt and what was drawn
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    # tokens that are in the caches when all that is queued has run; more may have ended it before
    filled: int = 0
    goal: int = 0  # tokens to put in before the first is drawn
    shared: int = 0  # tokens that another began with, too
    finished: bool = False

    @property
    def decoding(self) -> bool:
        return self.filled >= self.goal

    @property
    def last(self) -> int:
        """The position of its last token, at the latest."""
        return len(self.request.ids) + self.request.count - 1


@dataclass(frozen=True)
class Queued:
    """A program on the device, and whose tokens it will give: by column of its result."""

    drawn: Drawn
    works: tuple[tuple[int, Work], ...]
    steps: int
    since: float


class Scheduler:
    def __init__(
        self, engine: Engine, pages: Pages, chunk: int | None = None, most_pages: int | None = None
    ):
        self.engine, self.pages, self.chunk = engine, pages, chunk
        size = engine.size
        self.page = size.page or size.length
        self.columns = -(-size.length // self.page)
        self.most_pages = min(most_pages or self.columns, pages.count)  # of one sequence
        self.learning = pages.most_idle + pages.most_hosted > 0
        self.snapshots = self.learning and engine.has_slot_caches
        self.waiting: deque[Work] = deque()
        self.running: list[Work] = []  # the oldest first
        self.slots = list(range(size.slots))[::-1]  # that nobody has
        self.halted: set[int] = set()  # slots whose sequence the host has ended
        self.queue: deque[Queued] = deque()
        self.steps, self.looked = BLOCK, 0.0
        self.together = (
            jax.process_count() > 1
        )  # all processes must queue the same: clocks may not decide
        self.taken = self.broken = (
            False  # by one who reads its news; by an error in the middle of a step
        )
        self.stuck = False  # pages are too few for who waits first
        self.preempted = 0  # times that a sequence gave its pages back

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self.queue)

    @property
    def room(self) -> int:
        """How many more requests could be at work now, as far as slots go."""
        return len(self.slots) - len(self.waiting)

    def refusal(self, request: Request) -> str | None:
        """Why a request cannot be served, in a sentence."""
        ids, vocabulary = request.ids, self.engine.programs.config.vocab_size
        if not ids:
            return "the prompt is empty: there is nothing to continue"
        if request.count < 1:
            return f"max_new_tokens={request.count} must be a whole number of at least 1"
        wrong = next((token for token in ids if not 0 <= token < vocabulary), None)
        if wrong is not None:
            return f"token id {wrong} is outside the vocabulary, 0 to {vocabulary - 1}"
        most = min(self.engine.size.length, self.most_pages * self.page)
        if len(ids) + request.count > most:
            return (
                f"a prompt of {len(ids)} tokens and {request.count} new ones do not fit into {most}, which is what a "
                "sequence may have here: shorten the prompt, ask for fewer, or raise max_target_length (or, with "
                "pages, pagedattn_num_pages or pagedattn_max_pages_per_group)"
            )
        return None

    def add(self, number: int, request: Request) -> None:
        """A request that nothing speaks against (`refusal`)."""
        self.waiting.append(Work(number, request, list(request.ids)))

    def cancel(self, number: int) -> None:
        """The host has what it wants of a request."""
        for work in [*self.waiting, *self.running]:
            if work.number == number:
                work.finished = True
                if work in self.running:
                    self.halted.add(work.slot)
                    self.release(work)
                else:
                    self.waiting.remove(work)
                    self.stuck = False

    def run(self, requests: list[Request]) -> list[list[int]]:
        """The new tokens of each."""
        for refusal in map(self.refusal, requests):
            if refusal is not None:
                raise UserError(refusal)
        for number, request in enumerate(requests):
            self.add(number, request)
        found: list[list[int]] = [[] for _ in requests]
        while self.busy:
            for news in self.step():
                found[news.number] += news.tokens
        return found

    def step(self) -> list[News]:
        """Queue what can be done, and tell what came of what was queued before."""
        self.admit()
        queued = len(self.queue)
        while group := self.next_group():
            self.put(*group)
            if self.chunk:
                break
        news: list[News] = []
        if any(work.decoding for work in self.running):
            news += self.extend()
        # The newest program may run on while the host works on the others' tokens.
        leave = 1 if len(self.queue) > queued else 0
        while len(self.queue) > leave:
            news += self.collect()
        return news

    def admit(self) -> None:
        while self.waiting and self.slots and not self.stuck:
            work = self.waiting[0]
            if self.learning and any(
                self.alike(work, other) for other in self.running if not other.decoding
            ):
                return  # when the other is put in, they share what they begin with
            matched = self.pages.match(work.ids) if self.learning else None
            held = list(matched.pages) if matched else []
            need = -(-len(work.ids) // self.page) - len(held)
            # A page more for each that is at work: else one that came would soon have to leave
            # again.
            spare = len(self.running) if self.page_wise else 0
            taken = self.pages.take(need) if self.pages.free >= need + spare else None
            if taken is None:
                self.pages.give(held)
                self.stuck = True  # there is no use in trying again before somebody leaves
                return
            self.waiting.popleft()
            work.pages = held + taken
            work.slot = self.slots.pop() if self.page_wise else work.pages[0]
            if not self.page_wise:
                self.slots.remove(work.slot)
            work.filled, work.goal = (matched.length if matched else 0), len(work.ids)
            work.shared = matched.known if matched else 0
            if matched and matched.snapshot is not None:
                self.engine.put_slot(work.slot, matched.snapshot)
            self.running.append(work)

    def alike(self, one: Work, other: Work) -> bool:
        """Whether two prompts have their first page in common."""
        return len(one.ids) > self.page and one.ids[: self.page] == other.ids[: self.page]

    @property
    def page_wise(self) -> bool:
        return not self.engine.aligned

    def piece(self, work: Work) -> int:
        """How many of a prompt's tokens are put in next."""
        count = work.goal - work.filled
        if self.chunk:
            count = min(count, self.chunk)
        if self.snapshots:
            # What a slot keeps is copied where others went another way, and at the prompt's last
            # whole page.
            for place in (work.shared, (work.goal - 1) // self.page * self.page):
                if place > work.filled:
                    return min(count, place - work.filled)
        return count

    def next_group(self) -> tuple[list[Work], bool] | None:
        """Prompts that one program can put in together: the oldest, and any that fill a row with it
        (True), or others of about its size."""
        unfilled = [work for work in self.running if not work.decoding]
        if not unfilled:
            return None
        if packed := self.packed(unfilled):
            return packed, True
        kind = self.form(unfilled[0])
        alike = [work for work in unfilled if self.form(work) == kind]
        return alike[: most_rows(kind[0])], False

    def form(self, work: Work) -> tuple[int, bool]:
        return rounded(self.piece(work)), work.filled == 0

    def packed(self, unfilled: list[Work]) -> list[Work]:
        """The oldest prompt and others that fill up a row; none where rows of their own are
        better.
        """
        first, *others = [work for work in unfilled if work.filled == 0] or unfilled[:1]
        if not self.engine.packs or first is not unfilled[0] or self.piece(first) > PACKED:
            return []
        row, room = [first], PACKED - self.piece(first)
        # The largest first: they leave room for small ones.
        for work in sorted(others, key=self.piece, reverse=True):
            if self.piece(work) <= room and len(row) < PACKED_PROMPTS[-1]:
                row.append(work)
                room -= self.piece(work)
        # A program for a few rows of their own takes fewer tokens, unless they are long.
        many = room <= PACKED // 2 or SOME_ROWS * rounded(self.piece(first)) >= PACKED
        return row if len(row) > SOME_ROWS or (len(row) > 1 and many) else []

    def put(self, group: list[Work], packed: bool = False) -> None:
        """Queue the next piece of each, all in one row or each in its own."""
        width, fresh = self.form(group[0])
        if packed:
            width, rows = PACKED, next(count for count in PACKED_PROMPTS if count >= len(group))
        elif self.engine.few_programs:
            most = min(most_rows(width), power(self.engine.size.slots))
            rows = next(count for count in (1, min(SOME_ROWS, most), most) if count >= len(group))
        else:
            rows = power(len(group))
        lines = 1 if packed else rows
        ids = np.zeros((lines, width), np.int32)
        positions = np.full((lines, width), -1, np.int32)
        segments = np.zeros((lines, width), np.int32)
        slots = np.full(rows, self.engine.size.slots, np.int32)
        final = np.zeros(rows, bool)
        begin = 0
        for row, work in enumerate(group):
            count, start = self.piece(work), work.filled
            places = (0, slice(begin, begin + count)) if packed else (row, slice(count))
            ids[places] = work.ids[start : start + count]
            positions[places] = np.arange(start, start + count)
            segments[places] = row + 1
            begin += count
            slots[row] = work.slot
            work.filled += count
            final[row] = work.decoding
            self.halted.discard(work.slot)  # the program sets the slot anew
        reach = 0 if fresh else self.reach(work.filled for work in group)
        requests = [work.request for work in group]
        requests += [replace(requests[0], sampling=GREEDILY)] * (rows - len(group))
        last = [work.last for work in group] + [0] * (rows - len(group))
        table = self.table(group, rows, range(len(group)))
        drawn = self.engine.prefill(
            Prompts(
                ids,
                positions,
                slots,
                table,
                final,
                wishes(requests, last),
                segments if packed else None,
            ),
            fresh=fresh,
            reach=reach,
            kind=kind_of(
                request.sampling for request, done in zip(requests, final, strict=True) if done
            ),
            scored=any(request.log_probs for request in requests),
        )
        complete = tuple((row, work) for row, work in enumerate(group) if work.decoding)
        if complete:
            self.queue.append(Queued(drawn, complete, 0, time.monotonic()))
        if self.learning:
            for work in group:
                self.learn(work)

    def extend(self) -> list[News]:
        """Queue a block of tokens of all that are complete; what came before is told if pages run
        out.
        """
        news: list[News] = []
        works = [work for work in self.running if work.decoding and work.filled < work.last]
        steps = min(self.steps, max((work.last - work.filled for work in works), default=0))
        if self.waiting and works:
            # Who ends first makes room.
            steps = min(steps, max(LEAST_STEPS, min(work.last - work.filled for work in works)))
        if works and self.engine.few_programs:
            steps = next(count for count in FIXED_STEPS if count >= steps)
        for work in works:
            while work in self.running and not self.grown(
                work, min(work.filled + steps, work.last)
            ):
                if self.queue:
                    news += self.collect()  # who finished gives pages back
                else:
                    self.preempt(self.running[-1])
        works = [work for work in works if work in self.running]
        if not works:
            return news
        for work in works:
            work.filled = min(work.filled + steps, work.last)
        slots = self.engine.size.slots
        halted = np.zeros(slots, bool)
        halted[list(self.halted)] = True
        count = next(count for count in self.engine.row_counts if count >= len(works))
        rows = None
        columns = [work.slot for work in works]
        if count < slots:
            rows = np.full(count, slots, np.int32)
            rows[: len(works)] = columns
            columns = list(range(len(works)))
        drawn = self.engine.decode(
            self.table(works, count, columns),
            halted,
            steps,
            rows,
            reach=self.decode_reach(work.filled for work in works),
            kind=kind_of(work.request.sampling for work in works),
            scored=any(work.request.log_probs for work in works),
        )
        self.halted.clear()
        self.queue.append(
            Queued(drawn, tuple(zip(columns, works, strict=True)), steps, time.monotonic())
        )
        return news

    def grown(self, work: Work, tokens: int) -> bool:
        """Whether a sequence has pages for so many tokens, after taking what it lacks."""
        need = -(-tokens // self.page) - len(work.pages)
        taken = self.pages.take(need) if need > 0 else []
        if taken is None:
            return False
        work.pages += taken
        return True

    def preempt(self, work: Work) -> None:
        """Back to those that wait, as their first. Nothing is queued, so its tokens are all
        known.
        """
        self.preempted += 1
        self.halted.add(work.slot)
        self.release(work)
        self.waiting.appendleft(work)

    def collect(self) -> list[News]:
        """What came of the oldest program in the queue."""
        done = self.queue.popleft()
        tokens = np.atleast_2d(np.asarray(done.drawn.tokens))
        log_probs = (
            None
            if done.drawn.log_probs is None
            else np.atleast_2d(np.asarray(done.drawn.log_probs))
        )
        now = time.monotonic()
        if done.steps and not self.together:
            each = (now - max(done.since, self.looked)) / done.steps
            self.steps = int(min(max(BLOCK_SECONDS / max(each, 1e-9), 1), BLOCK))
        self.looked = now
        return [
            self.told(work, tokens[:, column], None if log_probs is None else log_probs[:, column])
            for column, work in done.works
            if not work.finished
        ]

    def told(self, work: Work, column: np.ndarray, log_probs: np.ndarray | None) -> News:
        request, found = work.request, []
        finished, error = None, None
        for token in column.tolist():
            if token == IDLE:
                break
            if token == BROKEN:
                finished, error = (
                    "error",
                    "the model's scores are not numbers (NaN or infinity): its weights are broken",
                )
                break
            found.append(token)
            work.ids.append(token)
            if token in request.ends:
                finished = "end"
            elif len(work.ids) > work.last:
                finished = "length"
            if finished:
                break
        if finished:
            work.finished = True
            if finished == "end" and work.ids[-1] not in request.ends[:MOST_ENDS]:
                self.halted.add(work.slot)
            if error is not None:
                self.wipe(work)
            self.release(work, worth_learning=error is None)
        asked = (
            ()
            if log_probs is None or not request.log_probs
            else tuple(log_probs[: len(found)].tolist())
        )
        return News(work.number, tuple(found), asked, finished, error)

    def wipe(self, work: Work) -> None:
        """No number that is none stays behind in what others will have: even times a weight of zero
        it would count.
        """
        for page in self.pages.disown(work.pages):
            self.engine.clear_page(page)
        self.engine.clear_slot(work.slot)

    def release(self, work: Work, worth_learning: bool = True) -> None:
        """Slot and pages are free for what is queued from now on."""
        if self.learning and not self.snapshots and work.decoding and worth_learning:
            self.pages.learn(work.ids[:-1], work.pages[: len(work.ids[:-1]) // self.page])
        self.pages.give(work.pages)
        self.stuck = False
        self.slots.append(work.slot)
        self.running.remove(work)
        work.pages, work.slot, work.filled = [], -1, 0

    def learn(self, work: Work) -> None:
        """Whole pages of a prompt are known now to those that come later."""
        whole = work.filled // self.page
        if whole * self.page == work.filled and self.snapshots:
            kept = self.engine.take_slot(work.slot)
            self.pages.learn(work.ids[: work.filled], work.pages[:whole], kept)
        elif not self.snapshots:
            self.pages.learn(work.ids[: whole * self.page], work.pages[:whole])

    def table(self, works: list[Work], rows: int, places: Iterable[int]) -> np.ndarray:
        """The pages of each, in its row."""
        table = np.zeros((rows, self.columns), np.int32)
        for place, work in zip(places, works, strict=True):
            table[place] = work.pages[
                0
            ]  # beyond its pages a row looks at its own, not at another's, and sees nothing
            table[place, : len(work.pages)] = work.pages
        return table

    def decode_reach(self, filled: Iterable[int]) -> int:
        return 0 if self.engine.in_place else self.reach(filled)

    def reach(self, filled: Iterable[int]) -> int:
        return min(power(max(LEAST_REACH, *filled)), self.columns * self.page)


def wishes(requests: list[Request], last: list[int]) -> Wishes:
    ends = np.full((len(requests), MOST_ENDS), IDLE, np.int32)
    for row, request in zip(ends, requests, strict=True):
        some = request.ends[:MOST_ENDS]
        row[: len(some)] = some
    seeds: Any = np.array([request.seed % 2**32 for request in requests], np.uint32)
    return Wishes(
        np.array(last, np.int32), seeds, ends, Rows.of([request.sampling for request in requests])
    )


def power(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def most_rows(width: int) -> int:
    """That a program puts in, a power of two."""
    return power(max(1, PREFILL_TOKENS // width) + 1) // 2


def rounded(count: int) -> int:
    """The next power of two, or the middle between two of them: few widths, little padding."""
    width = max(power(count), LEAST_WIDTH)
    return width // 4 * 3 if count <= width // 4 * 3 and width > LEAST_WIDTH else width
