"""The invariants of a prefix cache, checked from scratch."""

from maxtext.inference.engine.prefix_cache import PrefixCache


def check_consistent(cache: PrefixCache) -> None:
    """Assert that counts, queues and the tree agree."""
    pool = cache.pool
    check_blocks(cache)
    nodes = []
    stack = [cache.root]
    while stack:
        node = stack.pop()
        children = node.children.values()
        on_device = sum(child.block is not None for child in children)
        assert node.num_children_on_device == on_device
        for tokens, child in node.children.items():
            assert child.tokens == tokens
            assert len(tokens) == cache.block_size
            assert child.parent is node
            assert (child.block is not None) != child.in_host
            assert child.block is None or cache.nodes[child.block] is child
            assert child.in_host or node is cache.root or node.block is not None, (
                "a node on the device has its parent there"
            )
        nodes.extend(children)
        stack.extend(children)
    assert cache.num_on_device == sum(node.block is not None for node in nodes)
    assert cache.num_on_device == sum(node is not None for node in cache.nodes)
    assert cache.num_in_host == sum(node.in_host for node in nodes)
    for queue in (cache.device_leaves, cache.host_leaves):
        candidates = {node for node in nodes if queue.is_candidate(node)}
        assert queue.candidates() == candidates, "every candidate is in its queue"
        assert len(queue.heap) <= 2 * pool.num_blocks + 2 * cache.max_host_blocks + 64


def check_blocks(cache: PrefixCache) -> None:
    """Every block is unused, referenced or idle."""
    pool = cache.pool
    referenced = [block for block in range(pool.num_blocks) if pool.is_referenced(block)]
    idle = [
        block
        for block, node in enumerate(cache.nodes)
        if node is not None and not pool.is_referenced(block)
    ]
    assert min(pool.ref_counts, default=0) >= 0
    assert pool.num_referenced == len(referenced)
    assert sorted([*pool.unused, *referenced, *idle]) == list(range(pool.num_blocks))
    assert [cache.nodes[block] for block in idle] == sorted(cache.idle, key=cache.block_of)
    assert list(cache.idle) == sorted(cache.idle, key=lambda node: node.last_used)
    assert len(cache.idle) <= cache.max_idle_blocks
    assert cache.num_in_host <= cache.max_host_blocks
