"""The prefix cache: which blocks of the KV cache hold which tokens, so that requests share them.

The KV cache of full attention is a pool of blocks of `block_size` tokens in each layer. A sequence
references the blocks of its block table, alone or together with others that begin with the same
tokens. A block without references is unused, or stays cached for later requests; cached blocks
without references are evicted when blocks run short.

Cached blocks form a tree: a node holds the tokens of one block, and its parent the block before, so
that a path from the root is a prefix. Nodes are matched by their exact tokens. A block is useless
without those before it, so a node in device memory has its parent there too, and eviction takes the
least recently used node without children on the device. An evicted node is offloaded to host memory
if that has capacity, where it displaces the least recently used node, and it is loaded again when
it is matched. A snapshot of the recurrent state belongs to its node: it is offloaded with the node,
stays in host memory, and is dropped when the node is removed.

The contents of a block must not change once it is inserted: a sequence writes only to blocks after
its full ones.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from maxtext.common.types import Tree


class BlockPool:
    """`num_blocks` blocks, each referenced by any number of sequences.

    A block without references is unused, or belongs to the prefix cache, which evicts it when
    blocks run short. `num_free` counts both.
    """

    def __init__(self, num_blocks: int):
        assert num_blocks >= 0
        self.num_blocks = num_blocks
        self.unused = list(reversed(range(num_blocks)))  # the last is allocated next
        self.ref_counts = [0] * num_blocks
        self.num_referenced = 0

    @property
    def num_free(self) -> int:
        """How many blocks no sequence references."""
        return self.num_blocks - self.num_referenced

    def allocate(self, count: int) -> list[int]:
        """`count` unused blocks, with one reference each."""
        blocks = [self.unused.pop() for _ in range(count)]
        for block in blocks:
            self.ref_counts[block] = 1
        self.num_referenced += count
        return blocks

    def acquire(self, block: int) -> bool:
        """Add a reference; returns whether it is the first."""
        self.ref_counts[block] += 1
        first = self.ref_counts[block] == 1
        self.num_referenced += first
        return first

    def release(self, block: int) -> bool:
        """Drop a reference; returns whether it was the last. The block is not unused yet."""
        assert self.ref_counts[block] > 0, f"block {block} is freed but not referenced"
        self.ref_counts[block] -= 1
        last = self.ref_counts[block] == 0
        self.num_referenced -= last
        return last

    def is_referenced(self, block: int) -> bool:
        return self.ref_counts[block] > 0

    def only_referenced_once(self, blocks: Sequence[int]) -> list[int]:
        return [block for block in blocks if self.ref_counts[block] == 1]


class BlockStore(Protocol):
    """Copies between the KV cache on the device and host memory."""

    def read_block(self, block: int) -> Tree:
        """A copy of a block in all layers, in host memory."""

    def write_block(self, block: int, data: Tree) -> None:
        """Write what `read_block` returned into a block."""

    def to_host(self, snapshot: Tree) -> Tree:
        """A snapshot in host memory."""


@dataclass(frozen=True)
class PrefixMatch:
    """Blocks with the first `length` tokens of a request, with a reference for the caller."""

    blocks: list[int]
    length: int
    snapshot: Tree | None
    # The longest common prefix with a cached sequence. It is longer than `length` if the recurrent
    # state there was not saved.
    common_length: int = field(default=0, compare=False)


class Node:
    """A cached block: on the device (`block`), in host memory (`in_host`, `data`), or removed
    (neither).
    """

    __slots__ = (
        "block",
        "children",
        "data",
        "in_host",
        "last_used",
        "num_children_on_device",
        "parent",
        "snapshot",
        "tokens",
    )

    def __init__(self, tokens: tuple[Hashable, ...], parent: "Node | None"):
        self.tokens = tokens
        self.parent = parent
        self.children: dict[tuple[Hashable, ...], Node] = {}
        self.num_children_on_device = 0
        self.block: int | None = None
        self.in_host = False
        self.data: Tree = None
        self.snapshot: Tree | None = None
        self.last_used = 0  # when its last reference was dropped


class LruQueue:
    """Eviction candidates by last use. An entry is valid while its node has that time and
    `is_candidate`; other entries are skipped.
    """

    def __init__(self, is_candidate: Callable[[Node], bool]):
        self.is_candidate = is_candidate
        self.heap: list[tuple[int, Node]] = []
        self.limit = 64

    def add(self, node: Node) -> None:
        heapq.heappush(self.heap, (node.last_used, node))
        if len(self.heap) > self.limit:  # invalid entries must not accumulate without evictions
            self.heap = [(node.last_used, node) for node in self.candidates()]
            heapq.heapify(self.heap)
            self.limit = 2 * len(self.heap) + 64

    def candidates(self) -> set[Node]:
        return {
            node
            for last_used, node in self.heap
            if node.last_used == last_used and self.is_candidate(node)
        }

    def pop(self) -> Node | None:
        while self.heap:
            last_used, node = heapq.heappop(self.heap)
            if node.last_used == last_used and self.is_candidate(node):
                return node
        return None


class PrefixCache:
    """Allocates the blocks of a pool, and finds those that hold the prefix of a request.

    `max_idle_blocks` cached blocks without references stay on the device, and `max_host_blocks`
    more in host memory; with neither, sequences share only blocks in use. `snapshots`: the model
    also has a state of fixed size, so a request can only resume from a prefix with a snapshot of
    that state.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        max_idle_blocks: int = 0,
        max_host_blocks: int = 0,
        store: BlockStore | None = None,
        snapshots: bool = False,
    ):
        assert block_size > 0
        assert min(max_idle_blocks, max_host_blocks) >= 0
        assert store is not None or not max_host_blocks, "blocks in host memory need a store"
        self.pool = pool
        self.block_size = block_size
        self.max_idle_blocks = max_idle_blocks
        self.max_host_blocks = max_host_blocks
        self.store = store
        self.snapshots = snapshots
        self.root = Node((), None)
        self.nodes: list[Node | None] = [None] * pool.num_blocks  # of the blocks that are cached
        # Nodes on the device without references, the least recently used first.
        self.idle: OrderedDict[Node, None] = OrderedDict()
        idle = self.idle  # a closure over self would be a cycle, which delays freeing the caches
        self.device_leaves = LruQueue(lambda node: node in idle and not node.num_children_on_device)
        self.host_leaves = LruQueue(lambda node: node.in_host and not node.children)
        self.clock = 0
        self.num_on_device = 0
        self.num_in_host = 0
        self.hits = 0  # tokens that `match` found, and tokens that it did not
        self.misses = 0

    @property
    def enabled(self) -> bool:
        return self.max_idle_blocks + self.max_host_blocks > 0

    @property
    def num_free_blocks(self) -> int:
        """How many blocks `allocate` could return."""
        return self.pool.num_free

    def match(self, tokens: Sequence[int], namespace: Hashable = 0) -> PrefixMatch:
        """The longest cached prefix in full blocks, with a reference for the caller. At least one
        token is left to compute. Sequences share blocks only in the same namespace: that of their
        adapter and the salt of their request.

        Blocks in host memory are loaded to the device as long as blocks are free.
        """
        common = self.longest_path(tokens, namespace)
        acquired: list[Node] = []
        for node in self.resumable(common):
            if not self.acquire(node):
                break
            acquired.append(node)
        matched = self.resumable(acquired)
        self.free([self.block_of(node) for node in acquired[len(matched) :]])
        length = len(matched) * self.block_size
        self.hits += length
        self.misses += len(tokens) - length
        return PrefixMatch(
            blocks=[self.block_of(node) for node in matched],
            length=length,
            snapshot=matched[-1].snapshot if matched and self.snapshots else None,
            common_length=len(common) * self.block_size,
        )

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with a reference for the caller, evicting cached blocks as needed; None if
        too few are free.
        """
        assert count >= 0
        if count > self.num_free_blocks:
            return None
        while len(self.pool.unused) < count:
            self.evict()
        return self.pool.allocate(count)

    def share(self, block: int) -> None:
        """Add a reference to a block that a sequence references."""
        assert self.pool.is_referenced(block)
        self.pool.acquire(block)

    def free(self, blocks: Sequence[int]) -> None:
        """Drop the caller's reference to each block. Cached blocks stay cached as far as the limits
        allow.
        """
        for block in reversed(blocks):  # the end of a prefix is older than its beginning
            if not self.pool.release(block):
                continue
            node = self.nodes[block]
            if node is None:
                self.pool.unused.append(block)
            else:
                self.clock += 1
                node.last_used = self.clock
                self.idle[node] = None
                self.enqueue(node)
        while len(self.idle) > self.max_idle_blocks:
            self.evict()

    def invalidate(self, blocks: Sequence[int]) -> list[int]:
        """Remove blocks from the cache; returns those that only the caller references."""
        for block in blocks:
            node = self.nodes[block]
            if node is not None:
                self.remove(node)
        return self.pool.only_referenced_once(blocks)

    def insert(
        self,
        tokens: Sequence[int],
        blocks: Sequence[int],
        snapshot: Tree | None = None,
        namespace: Hashable = 0,
    ) -> None:
        """Cache blocks[i], which the caller references, as the block of tokens[i * block_size :
        (i + 1) * block_size]. A partial last block is left out.

        If another block caches the same prefix, it stays while it has references, and the caller's
        block is not cached. Otherwise the caller's block replaces it. `snapshot` is the recurrent
        state after the full blocks; the first one that is inserted stays.
        """
        assert snapshot is None or self.snapshots, "this cache has no snapshots"
        node, keys = self.root, self.block_keys(tokens, len(tokens), namespace)
        assert len(blocks) >= len(keys), f"{len(tokens)} tokens exceed {len(blocks)} blocks"
        for key, block in zip(keys, blocks, strict=False):
            assert self.pool.is_referenced(block), f"block {block} is inserted but not referenced"
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(key, node)
            if child.block != block:
                assert self.nodes[block] is None, f"block {block} is cached for other tokens"
                if child.block is None or not self.pool.is_referenced(child.block):
                    self.attach(child, block)
            node = child
        if snapshot is not None and node.snapshot is None:
            assert node is not self.root, "a snapshot needs a full block"
            node.snapshot = snapshot

    def evict(self) -> None:
        """Free the block of the least recently used idle node without children on the device."""
        node = self.device_leaves.pop()
        if node is None:
            # Its children are referenced by sequences with copies of their own of this prefix:
            # they leave the cache with it.
            self.remove(next(iter(self.idle)))
        elif not self.max_host_blocks:
            self.remove(node)
        else:
            self.offload(node)

    def offload(self, node: Node) -> None:
        """Move an idle node to host memory, in place of the least recently used node there."""
        assert self.store is not None
        assert node.parent is not None
        if self.num_in_host == self.max_host_blocks:
            oldest = self.host_leaves.pop()
            assert oldest is not None
            self.remove(oldest)
        data = self.store.read_block(self.block_of(node))
        self.detach(node)
        node.in_host = True
        node.data = data
        if node.snapshot is not None:
            node.snapshot = self.store.to_host(node.snapshot)
        self.num_in_host += 1
        self.enqueue(node)
        self.enqueue(node.parent)

    # The tree.

    def block_keys(
        self, tokens: Sequence[int], end: int, namespace: Hashable = 0
    ) -> list[tuple[Hashable, ...]]:
        """The tokens of each full block before `end`; the first key also has the namespace, unless
        that is falsy."""
        keys: list[tuple[Hashable, ...]] = [
            tuple(tokens[start : start + self.block_size])
            for start in range(0, end - self.block_size + 1, self.block_size)
        ]
        if keys and namespace:
            keys[0] = (namespace, *keys[0])
        return keys

    def longest_path(self, tokens: Sequence[int], namespace: Hashable = 0) -> list[Node]:
        """The nodes of the longest cached prefix that leaves a token to compute."""
        nodes, node = [], self.root
        for key in self.block_keys(tokens, len(tokens) - 1, namespace):
            child = node.children.get(key)
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def resumable(self, path: list[Node]) -> list[Node]:
        """The longest beginning of a path that a request can resume from."""
        end = len(path)
        while self.snapshots and end and path[end - 1].snapshot is None:
            end -= 1
        return path[:end]

    def block_of(self, node: Node) -> int:
        assert node.block is not None
        return node.block

    def attach(self, node: Node, block: int) -> None:
        """Make a referenced block the block of a node, in place of its previous one."""
        self.detach(node)
        assert node.parent is not None
        node.block = block
        self.nodes[block] = node
        self.num_on_device += 1
        node.parent.num_children_on_device += 1

    def detach(self, node: Node) -> None:
        """Remove a node from device or host memory. Its block is no longer cached, and unused if
        nothing references it.
        """
        if node.block is not None:
            self.nodes[node.block] = None
            if not self.pool.is_referenced(node.block):
                del self.idle[node]
                self.pool.unused.append(node.block)
            node.block = None
            self.num_on_device -= 1
            assert node.parent is not None
            node.parent.num_children_on_device -= 1
        elif node.in_host:
            node.in_host = False
            node.data = None
            self.num_in_host -= 1

    def enqueue(self, node: Node) -> None:
        """Add a node to the eviction queue that it is a candidate of, if any."""
        for queue in (self.device_leaves, self.host_leaves):
            if queue.is_candidate(node):
                queue.add(node)

    def acquire(self, node: Node) -> bool:
        """Add a reference to the block of a node. False if the node is in host memory and no block
        is free, or if loading a node before it has displaced it.
        """
        if node.block is not None:
            if self.pool.acquire(node.block):
                del self.idle[node]
            return True
        if not node.in_host or not self.num_free_blocks:
            return False
        data = node.data
        self.detach(node)  # before the allocation, which may remove nodes from host memory
        [block] = self.allocate(1) or []
        assert self.store is not None
        self.store.write_block(block, data)
        self.attach(node, block)
        return True

    def remove(self, node: Node) -> None:
        """Remove a node and its descendants from the cache."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        stack = [node]
        while stack:
            removed = stack.pop()
            stack.extend(removed.children.values())
            self.detach(removed)
            removed.snapshot = None  # an eviction queue may still refer to the node
        self.enqueue(parent)
