"""A radix view of prefixes: one node a full block, for whatever is cached and for every unfinished sequence.

Where a sequence goes on alone, its blocks have neither nodes nor hashes until they are computed, or another sequence
comes that far.
"""

from __future__ import annotations

from collections.abc import Iterable

from sidestream.cache.block_hashes import BlockHashes


class PrefixNode:
    """A block's content with everything before it.

    Attributes:
        content: hash of the chain up to here.
        depth: blocks from the start, this one included.
        children: nodes that continue it.
        ends: unfinished sequences whose path ends here.
        block: where the pool holds it, or None.
        snapshot: slot with the state behind its last token, or None.
        wanted: prefixes part or end here, so a snapshot would be of use to others.
        producer: who said last that it would compute this block.
        alone: the one sequence that goes on from here with full blocks that have no nodes yet; nobody else does.
    """

    __slots__ = ("alone", "block", "children", "content", "depth", "ends", "parent", "producer", "snapshot", "wanted")

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
        self.alone: Producer | None = None


class Producer:
    """A sequence as far as others may wait for what it computes.

    Attributes:
        hashes: of its full blocks whose tokens are known.
        path: those of them that have nodes, from the front.
        active: it runs, or is about to.
        last_full: blocks that its present prefill fills.
        num_computed: positions that planned steps have computed or will.
    """

    __slots__ = ("active", "hashes", "last_full", "num_computed", "path")

    def __init__(self, hashes: BlockHashes) -> None:
        self.hashes = hashes
        self.path: list[PrefixNode] = []
        self.last_full = 0
        self.active = False
        self.num_computed = 0


class PrefixTree:
    """Nodes by content hash. A node stays while it is cached, continued, or the end of an unfinished sequence."""

    def __init__(self) -> None:
        self.nodes: dict[bytes, PrefixNode] = {}

    def enter(self, sequence: Producer) -> int:
        """Walk a new sequence's path as far as others have it too, and one block further.

        Returns:
            Blocks of the path that others have.
        """
        path, hashes, nodes = sequence.path, sequence.hashes, self.nodes
        node: PrefixNode | None = None
        full = hashes.num_full
        while (known := len(path)) < full:
            if node is not None and node.alone is not None:
                self._show_next(node)
            content = hashes.make(known + 1)[known]
            node = nodes.get(content)
            if node is None:
                if not known:  # what most prompts begin with is their own
                    nodes[content] = node = PrefixNode(content, None)
                    path.append(node)
                    node.ends = 1
                    node.alone = sequence if full > 1 else None
                    return 0
                break
            path.append(node)
        if path:
            path[-1].ends += 1
        self.extend(sequence, min(known + 1, hashes.num_full))
        return known

    def extend(self, sequence: Producer, count: int) -> None:
        """Complete a sequence's path up to ``count`` of its full blocks."""
        path, nodes, known = sequence.path, self.nodes, len(sequence.path)
        if known >= count:
            return
        node = path[-1] if path else None
        if node is not None:
            node.ends -= 1
        for content in sequence.hashes.make(count)[known:count]:
            if node is not None and node.alone is not None:
                if node.alone is sequence:
                    node.alone = None
                else:
                    self._show_next(node)
            child = nodes.get(content)
            if child is None:
                child = PrefixNode(content, node)
                if sequence.active:
                    child.producer = sequence
                if node is not None:
                    node.children += 1
                nodes[content] = child
            path.append(child)
            node = child
        assert node is not None
        node.ends += 1
        if count < sequence.hashes.num_full:
            node.alone = sequence

    def _show_next(self, node: PrefixNode) -> None:
        """Another sequence comes by: the next block of the one that goes on from here alone gets its node."""
        sequence, node.alone = node.alone, None
        if sequence is not None:
            self.extend(sequence, node.depth + 1)

    def leave(self, sequence: Producer) -> None:
        """A sequence is done with its path, which is empty afterwards."""
        path = sequence.path
        if path:
            end = path[-1]
            path.clear()
            if end.alone is sequence:
                end.alone = None
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

    def rebuild(self, sequences: Iterable[Producer]) -> None:
        """Count anew what keeps each node, and forget what nothing keeps: ``enter`` was interrupted somewhere.

        Args:
            sequences: all unfinished ones.
        """
        for node in self.nodes.values():
            node.children = node.ends = 0
            node.alone = None
        for sequence in sequences:
            if sequence.path:
                end = sequence.path[-1]
                end.ends += 1
                if end.depth < sequence.hashes.num_full:
                    end.alone = sequence
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

    def check_integrity(self, sequences: Iterable[Producer]) -> None:
        """Recount what keeps each node, given all unfinished sequences.

        Raises:
            AssertionError: with the node that differs.
        """
        children: dict[bytes, int] = {}
        ends: dict[bytes, int] = {}
        for node in self.nodes.values():
            if node.parent is not None:
                assert self.nodes.get(node.parent.content) is node.parent, f"node {node.content.hex()} hangs in the air"
                children[node.parent.content] = children.get(node.parent.content, 0) + 1
        alone: dict[bytes, Producer] = {}
        for sequence in sequences:
            path, full = sequence.path, sequence.hashes.num_full
            for place, node in enumerate(path):
                assert self.nodes.get(node.content) is node, f"a path holds {node.content.hex()}, the tree does not"
                assert node.depth == place + 1, f"block {place + 1} of a path has depth {node.depth}"
            if path:
                ends[path[-1].content] = ends.get(path[-1].content, 0) + 1
            if len(path) < full:
                assert path, f"a sequence of {full} full blocks has no node"
                assert path[-1].content not in alone, f"two sequences go on alone behind {path[-1].content.hex()}"
                alone[path[-1].content] = sequence
        for content, node in self.nodes.items():
            counted = children.get(content, 0), ends.get(content, 0)
            assert (node.children, node.ends) == counted, (
                f"node {content.hex()} counts {node.children} children and {node.ends} ends, there are {counted}"
            )
            assert node.alone is alone.get(content), f"the wrong sequence goes on alone behind {content.hex()}"
            assert not (node.alone and node.children), f"one goes on alone behind {content.hex()}, where others do too"
            assert node.block is not None or any(counted), f"nothing keeps node {content.hex()}"
            assert node.block is not None or node.snapshot is None, f"snapshot {node.snapshot} has lost its block"
