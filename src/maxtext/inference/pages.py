"""The host's book of cache pages: which are free, who holds which, and which hold a known prefix of
tokens.

The cache of full attention is a pool of `count` pages of `size` tokens in each layer. A request
holds the pages of its table, alone or together with others that begin with the same tokens. A page
nobody holds is free, or stays known for requests to come; known pages that nobody holds are given
up when pages run short, so `free` is always all pages less those held.

Known pages form a tree: a node is the tokens of one page and its parent the page before, so that a
path from the root is a prefix. Nodes are found by their exact tokens. A page means nothing without
those before it, therefore a node in device memory has its parent there too, and what is given up is
always the least recently used node with none below it. A node given up moves to host memory where
there is room, the least recently used there being forgotten for it, and comes back when it is
matched. A snapshot belongs to its node: it goes with it to host memory and stays there, and is
dropped when the node is forgotten.

The contents of a page must not change once it is learned: a request writes only to pages that
follow its whole ones.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class Store(Protocol):
    """Copies between the pool on the device and host memory."""

    def read(self, page: int) -> Any:
        """The contents of a page, in all layers, as host data that stays when the page is
        written.
        """

    def write(self, page: int, data: Any) -> None:
        """Put what `read` gave into a page."""

    def host(self, snapshot: Any) -> Any:
        """A snapshot in host memory."""


@dataclass(frozen=True)
class Match:
    """Pages with the first `length` tokens of a request, which holds them from now on."""

    pages: list[int]
    length: int
    snapshot: Any | None
    known: int = field(
        default=0, compare=False
    )  # tokens that others began with, too: a snapshot there would have helped


class Node:
    """A known page: on the device (`page`), in host memory (`hosted`, `data`), or forgotten
    (neither).
    """

    __slots__ = (
        "below",
        "children",
        "data",
        "hosted",
        "page",
        "parent",
        "snapshot",
        "tokens",
        "used",
    )

    def __init__(self, tokens: tuple[int, ...], parent: "Node | None"):
        self.tokens, self.parent = tokens, parent
        self.children: dict[tuple[int, ...], Node] = {}
        self.below = 0  # children on the device
        self.page: int | None = None
        self.hosted = False
        self.data: Any = None
        self.snapshot: Any | None = None
        self.used = 0  # when it was last let go


class Oldest:
    """A queue by last use. An entry counts while its node has that time and is `ready`; others are
    passed over.
    """

    def __init__(self, ready: Callable[[Node], bool]):
        self.ready = ready
        self.heap: list[tuple[int, Node]] = []
        self.limit = 64

    def add(self, node: Node) -> None:
        heapq.heappush(self.heap, (node.used, node))
        if (
            len(self.heap) > self.limit
        ):  # so that passed entries do not pile up when nothing is ever taken
            self.heap = [(node.used, node) for node in self.waiting()]
            heapq.heapify(self.heap)
            self.limit = 2 * len(self.heap) + 64

    def waiting(self) -> set[Node]:
        return {node for used, node in self.heap if node.used == used and self.ready(node)}

    def pop(self) -> Node | None:
        while self.heap:
            used, node = heapq.heappop(self.heap)
            if node.used == used and self.ready(node):
                return node
        return None


class Pages:
    def __init__(
        self,
        count: int,
        size: int,
        *,
        known: int = 0,
        host: int = 0,
        store: Store | None = None,
        snapshots: bool = False,
    ):
        """`known`: how many pages nobody holds may stay known on the device; `host`: how many more
        in host memory.

        With neither there is no prefix caching. `snapshots`: the model keeps a state of fixed size
        besides the pages, so that only a prefix with a snapshot of that state can be gone on from.
        """
        assert size > 0
        assert min(count, known, host) >= 0
        assert store is not None or not host, "pages in host memory need a store"
        self.count, self.size, self.most_idle, self.most_hosted = count, size, known, host
        self.store, self.snapshots = store, snapshots
        self.root = Node((), None)
        self.unused = list(reversed(range(count)))  # neither held nor known; the last is taken next
        self.holders = [0] * count
        self.nodes: list[Node | None] = [None] * count  # of the pages that are known
        self.idle: OrderedDict[Node, None] = (
            OrderedDict()
        )  # on the device and not held, the longest idle first
        self.edges = Oldest(lambda node: node in self.idle and not node.below)
        self.leaves = Oldest(lambda node: node.hosted and not node.children)
        self.clock = 0
        self.held = 0
        self.known_on_device = 0
        self.known_on_host = 0
        self.hits = 0  # tokens found known by match, and tokens not
        self.misses = 0

    @property
    def free(self) -> int:
        """How many pages take() could give."""
        return self.count - self.held

    def match(self, tokens: Sequence[int]) -> Match:
        """The longest known prefix in whole pages, held for the caller; at least one token is left
        to compute.

        Pages known in host memory are brought back to the device as long as pages are free.
        """
        known = self.path(tokens)
        path = self.resumable(known)
        held: list[Node] = []
        for node in path:
            if not self.hold(node):
                break
            held.append(node)
        kept = self.resumable(held)
        self.give([self.page_of(node) for node in held[len(kept) :]])
        length = len(kept) * self.size
        self.hits += length
        self.misses += len(tokens) - length
        snapshot = kept[-1].snapshot if kept and self.snapshots else None
        return Match(
            [self.page_of(node) for node in kept], length, snapshot, len(known) * self.size
        )

    def take(self, count: int) -> list[int] | None:
        """`count` pages nobody holds, held for the caller, with known pages given up as needed;
        None if too few.
        """
        assert count >= 0
        if count > self.free:
            return None
        while len(self.unused) < count:
            self.give_up()
        pages = [self.unused.pop() for _ in range(count)]
        for page in pages:
            self.holders[page] = 1
        self.held += count
        return pages

    def give(self, pages: Sequence[int]) -> None:
        """The caller lets go of pages; those that are known stay so, as far as `known` and `host`
        allow.
        """
        for page in reversed(pages):  # the end of a prefix is older than its beginning
            assert self.holders[page] > 0, f"page {page} is given back and not held"
            self.holders[page] -= 1
            if self.holders[page]:
                continue
            self.held -= 1
            node = self.nodes[page]
            if node is None:
                self.unused.append(page)
            else:
                self.clock += 1
                node.used = self.clock
                self.idle[node] = None
                self.queue(node)
        while len(self.idle) > self.most_idle:
            self.give_up()

    def disown(self, pages: Sequence[int]) -> list[int]:
        """What is known of pages is forgotten; those of them that nobody but the caller holds."""
        for page in pages:
            node = self.nodes[page]
            if node is not None:
                self.forget(node)
        return [page for page in pages if self.holders[page] == 1]

    def learn(
        self, tokens: Sequence[int], pages: Sequence[int], snapshot: Any | None = None
    ) -> None:
        """pages[i], held by the caller, has tokens[i * size : (i + 1) * size]; a last part of a
        page is left out.

        A prefix that is known by another page keeps that page while somebody holds it, and the
        caller's stays unknown. Otherwise the caller's page takes its place. `snapshot` is the state
        after the whole pages, and the first that is given stays.
        """
        assert snapshot is None or self.snapshots, "snapshots were not asked for"
        if not self.most_idle and not self.most_hosted:
            return
        node, pieces = self.root, self.pieces(tokens, len(tokens))
        assert len(pages) >= len(pieces), (
            f"{len(tokens)} tokens are more than {len(pages)} pages hold"
        )
        for piece, page in zip(pieces, pages, strict=False):
            assert self.holders[page] > 0, f"page {page} is learned and not held"
            child = node.children.get(piece)
            if child is None:
                child = node.children[piece] = Node(piece, node)
            if child.page != page:
                assert self.nodes[page] is None, f"page {page} is known for other tokens"
                if child.page is None or not self.holders[child.page]:
                    self.place(child, page)
            node = child
        if snapshot is not None and node.snapshot is None:
            assert node is not self.root, "a snapshot needs a whole page"
            node.snapshot = snapshot

    # The tree.

    def pieces(self, tokens: Sequence[int], end: int) -> list[tuple[int, ...]]:
        """The tokens of each whole page before `end`."""
        return [
            tuple(tokens[start : start + self.size])
            for start in range(0, end - self.size + 1, self.size)
        ]

    def path(self, tokens: Sequence[int]) -> list[Node]:
        """The nodes of the longest known prefix that leaves a token."""
        nodes, node = [], self.root
        for piece in self.pieces(tokens, len(tokens) - 1):
            found = node.children.get(piece)
            if found is None:
                break
            nodes.append(found)
            node = found
        return nodes

    def resumable(self, path: list[Node]) -> list[Node]:
        """The longest beginning of a path that a request can go on from."""
        end = len(path)
        while self.snapshots and end and path[end - 1].snapshot is None:
            end -= 1
        return path[:end]

    def page_of(self, node: Node) -> int:
        assert node.page is not None
        return node.page

    def place(self, node: Node, page: int) -> None:
        """A held page becomes the page of a node; what the node had before goes."""
        self.leave(node)
        node.page = page
        self.nodes[page] = node
        self.known_on_device += 1
        assert node.parent is not None
        node.parent.below += 1

    def leave(self, node: Node) -> None:
        """A node is no longer where it was. Its page is unknown then, and free if nobody holds
        it.
        """
        if node.page is not None:
            self.nodes[node.page] = None
            if not self.holders[node.page]:
                del self.idle[node]
                self.unused.append(node.page)
            node.page = None
            self.known_on_device -= 1
            assert node.parent is not None
            node.parent.below -= 1
        elif node.hosted:
            node.hosted, node.data = False, None
            self.known_on_host -= 1

    def queue(self, node: Node) -> None:
        """Put a node in line to be given up, if it is one that can be."""
        for queue in (self.edges, self.leaves):
            if queue.ready(node):
                queue.add(node)

    def hold(self, node: Node) -> bool:
        """The caller holds the page of a node from now on. False if the node is in host memory and
        no page is free, or if it was forgotten to make room for one before it."""
        if node.page is not None:
            if not self.holders[node.page]:
                del self.idle[node]
                self.held += 1
            self.holders[node.page] += 1
            return True
        if not node.hosted or not self.free:
            return False
        data = node.data
        self.leave(node)  # before a page is taken, since that may forget what is in host memory
        [page] = self.take(1) or []
        assert self.store is not None
        self.store.write(page, data)
        self.place(node, page)
        return True

    def give_up(self) -> None:
        """Free the page of the least recently used idle node with none below it on the device."""
        node = self.edges.pop()
        if node is None:
            # Those below are held by requests with pages of their own for this prefix: they lose
            # what is known of them.
            self.forget(next(iter(self.idle)))
        elif not self.most_hosted:
            self.forget(node)
        else:
            if self.known_on_host == self.most_hosted:
                oldest = self.leaves.pop()
                assert oldest is not None
                self.forget(oldest)
            assert self.store is not None
            data = self.store.read(self.page_of(node))
            self.leave(node)
            node.hosted, node.data = True, data
            if node.snapshot is not None:
                node.snapshot = self.store.host(node.snapshot)
            self.known_on_host += 1
            self.queue(node)
            assert node.parent is not None
            self.queue(node.parent)

    def forget(self, node: Node) -> None:
        """A node and all below it are no longer known."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        going = [node]
        while going:
            gone = going.pop()
            going.extend(gone.children.values())
            self.leave(gone)
            gone.snapshot = None  # a queue may still have the node
        self.queue(parent)

    def check(self) -> None:
        """Assert that the book is consistent; looks at everything."""
        held = [page for page in range(self.count) if self.holders[page]]
        idle = [
            page
            for page, node in enumerate(self.nodes)
            if node is not None and not self.holders[page]
        ]
        assert min(self.holders, default=0) >= 0
        assert self.held == len(held)
        assert sorted([*self.unused, *held, *idle]) == list(range(self.count)), (
            "each page is in one place"
        )
        assert [self.nodes[page] for page in sorted(idle)] == sorted(self.idle, key=self.page_of)
        assert list(self.idle) == sorted(self.idle, key=lambda node: node.used)
        assert len(self.idle) <= self.most_idle
        assert self.known_on_host <= self.most_hosted
        nodes: list[Node] = []
        going = [self.root]
        while going:
            node = going.pop()
            assert node.below == sum(child.page is not None for child in node.children.values())
            for tokens, child in node.children.items():
                assert child.tokens == tokens
                assert len(tokens) == self.size
                assert child.parent is node
                assert (child.page is not None) != child.hosted
                assert child.page is None or self.nodes[child.page] is child
                assert child.hosted or node is self.root or node.page is not None, (
                    "a parent on the device"
                )
            nodes.extend(node.children.values())
            going.extend(node.children.values())
        assert self.known_on_device == sum(node.page is not None for node in nodes)
        assert self.known_on_device == sum(node is not None for node in self.nodes)
        assert self.known_on_host == sum(node.hosted for node in nodes)
        for queue in (self.edges, self.leaves):
            assert queue.waiting() == {node for node in nodes if queue.ready(node)}, (
                "each that can go is in line"
            )
            assert len(queue.heap) <= 2 * self.count + 2 * self.most_hosted + 64
