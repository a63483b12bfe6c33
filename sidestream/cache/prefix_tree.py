"""A radix view of prefixes: one node a full block, for whatever is cached and for every unfinished sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PrefixNode:
    """A block's content with everything before it.

    Attributes:
        content: hash of the chain up to here.
        depth: blocks from the start, this one included.
        children: nodes that continue it.
        ends: unfinished sequences whose last full block this is.
        block: where the pool holds it, or None.
        snapshot: slot with the state behind its last token, or None.
        wanted: prefixes part or end here, so a snapshot would be of use to others.
        producer: who said last that it would compute this block.
    """

    __slots__ = ("block", "children", "content", "depth", "ends", "parent", "producer", "snapshot", "wanted")

    def __init__(self, content: bytes, parent: PrefixNode | None) -> None:
        self.content = content
        self.parent = parent
        self.depth: int = 1 if parent is None else parent.depth + 1
        self.children = 0
        self.ends = 0
        self.block: int | None = None
        self.snapshot: int | None = None
        self.wanted = False
        self.producer: Producer | None = None


class Producer:
    """A sequence as far as others may wait for what it computes.

    Attributes:
        active: it runs, or is about to.
        last_full: blocks that its present prefill fills.
        num_computed: positions that planned steps have computed or will.
    """

    __slots__ = ("active", "last_full", "num_computed")

    def __init__(self) -> None:
        self.last_full = 0
        self.active = False
        self.num_computed = 0


class PrefixTree:
    """Nodes by content hash. A node stays while it is cached, continued, or the end of an unfinished sequence."""

    def __init__(self) -> None:
        self.nodes: dict[bytes, PrefixNode] = {}

    def extend(self, path: list[PrefixNode], hashes: Sequence[bytes]) -> int:
        """Walk and complete a sequence's path until it has one node a hash.

        Returns:
            How many nodes of the path there had been before.
        """
        nodes = self.nodes
        end = node = path[-1] if path else None
        for content in hashes[len(path) :]:
            found = nodes.get(content)
            if found is None:
                break
            node = found
            path.append(node)
        known = len(path)
        for content in hashes[known:]:  # nothing continues what is not there
            child = PrefixNode(content, node)
            if node is not None:
                node.children += 1
            nodes[content] = node = child
            path.append(node)
        if node is not end:
            assert node is not None
            node.ends += 1
            if end is not None:
                end.ends -= 1
        return known

    def leave(self, path: list[PrefixNode]) -> None:
        """A sequence is done with its path, which is empty afterwards."""
        if path:
            end = path[-1]
            path.clear()
            end.ends -= 1
            self.prune(end)

    def prune(self, node: PrefixNode) -> None:
        """Forget a node that nothing keeps, and those above it that only it kept."""
        current: PrefixNode | None = node
        while current is not None and not (current.children or current.ends) and current.block is None:
            assert current.snapshot is None, f"a snapshot of {current.depth} blocks without their last block"
            del self.nodes[current.content]
            current = current.parent
            if current is not None:
                current.children -= 1

    def rebuild(self, paths: Iterable[Sequence[PrefixNode]]) -> None:
        """Count anew what keeps each node, and forget what nothing keeps: ``extend`` was interrupted somewhere.

        Args:
            paths: of all unfinished sequences.
        """
        for node in self.nodes.values():
            node.children = node.ends = 0
        for path in paths:
            if path:
                path[-1].ends += 1
        kept: dict[bytes, PrefixNode] = {}
        for node in self.nodes.values():
            current: PrefixNode | None = node if node.ends or node.block is not None else None
            while current is not None and current.content not in kept:
                kept[current.content] = current
                current = current.parent
        for node in kept.values():
            if node.parent is not None:
                node.parent.children += 1
        self.nodes = kept

    def check_integrity(self, paths: Iterable[Sequence[PrefixNode]]) -> None:
        """Recount what keeps each node, given the paths of all unfinished sequences.

        Raises:
            AssertionError: with the node that differs.
        """
        children: dict[bytes, int] = {}
        ends: dict[bytes, int] = {}
        for node in self.nodes.values():
            if node.parent is not None:
                assert self.nodes.get(node.parent.content) is node.parent, f"node {node.content.hex()} hangs in the air"
                children[node.parent.content] = children.get(node.parent.content, 0) + 1
        for path in paths:
            for place, node in enumerate(path):
                assert self.nodes.get(node.content) is node, f"a path holds {node.content.hex()}, the tree does not"
                assert node.depth == place + 1, f"block {place + 1} of a path has depth {node.depth}"
            if path:
                ends[path[-1].content] = ends.get(path[-1].content, 0) + 1
        for content, node in self.nodes.items():
            counted = children.get(content, 0), ends.get(content, 0)
            assert (node.children, node.ends) == counted, (
                f"node {content.hex()} counts {node.children} children and {node.ends} ends, there are {counted}"
            )
            assert node.block is not None or any(counted), f"nothing keeps node {content.hex()}"
            assert node.block is not None or node.snapshot is None, f"snapshot {node.snapshot} has lost its block"
