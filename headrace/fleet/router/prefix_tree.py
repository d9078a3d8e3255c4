# SPDX-License-Identifier: Apache-2.0
"""A radix tree of recent texts: which owner has seen which prefix, with a size limit for each owner. Pure.

The policy `cache_aware` uses it with backends as owners. An owner of a node owns all its ancestors. The nodes of an owner
are ordered by last use, and a node comes after its descendants, so that the first one is always a leaf and the least
recently used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from typing import Any, Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)

NODE_COST = 64
"""Size of a node beside its characters: otherwise a tree of single characters would exceed every memory limit."""


_NO_CHILDREN: dict[str, Any] = {}
"""Shared by all leaves, so never changed (`Node.add_child`)."""
_NO_OWNERS: frozenset[Any] = frozenset()


class Node(Generic[Owner]):
    """The characters after a prefix, up to where texts differ."""

    __slots__ = ("children", "edge", "owners", "parent")

    def __init__(self, edge: str, parent: Node[Owner] | None) -> None:
        self.edge = edge
        self.parent = parent
        # There are very many leaves of one owner: they share empty containers.
        self.children: dict[str, Node[Owner]] = _NO_CHILDREN
        self.owners: frozenset[Owner] = _NO_OWNERS

    def add_child(self, child: Node[Owner]) -> None:
        """Add a child."""
        if self.children is _NO_CHILDREN:
            self.children = {}
        self.children[child.edge[0]] = child
        child.parent = self

    @property
    def cost(self) -> int:
        """Size of the node: its characters and `NODE_COST`."""
        return len(self.edge) + NODE_COST


class PrefixTree(Generic[Owner]):
    """The tree."""

    def __init__(self, limit: int) -> None:
        self.limit = max(limit, 2 * NODE_COST)
        """Maximum size of the nodes of one owner."""
        self._root: Node[Owner] = Node("", None)
        self._nodes: dict[Owner, OrderedDict[Node[Owner], None]] = {}
        self._sizes: dict[Owner, int] = {}
        self._owner_sets: dict[Owner, frozenset[Owner]] = {}
        self._oversized: set[Owner] = set()
        """Owners that may exceed the limit since one of their nodes was split."""

    def size(self, owner: Owner) -> int:
        """Return the size of an owner's nodes."""
        return self._sizes.get(owner, 0)

    def longest(self, text: str, among: Collection[Owner]) -> tuple[int, list[Owner]]:
        """Return the length of the longest prefix that any of these owners has seen, and those owners. Changes nothing."""
        best = 0
        everybody = last = _NO_OWNERS
        allowed = frozenset(among)
        node, index = self._root, 0
        while True:
            child = node.children.get(text[index : index + 1])
            if child is None:
                break
            # An owner of a node owns those above: as many owners are the same ones.
            owners = last if len(child.owners) == len(everybody) else child.owners & allowed
            if not owners:
                break
            everybody = child.owners
            complete = text.startswith(child.edge, index)
            index += len(child.edge) if complete else _common_length(text, index, child.edge)
            best, last = index, owners
            if not complete:
                break
            node = child
        return best, [owner for owner in among if owner in last] if last else []

    def lengths(self, text: str) -> dict[Owner, int]:
        """Return the length of the longest prefix that each owner has seen, of those that have seen one. Changes nothing."""
        lengths: dict[Owner, int] = {}
        owners, before = _NO_OWNERS, 0
        node, index = self._root, 0
        while True:
            child = node.children.get(text[index : index + 1])
            if child is None:
                break
            # An owner of a node owns those above: only where there are fewer does the prefix of some end.
            if len(child.owners) != len(owners):
                lengths.update(dict.fromkeys(owners, before))
                owners = child.owners
            complete = text.startswith(child.edge, index)
            index += len(child.edge) if complete else _common_length(text, index, child.edge)
            before = index
            if not complete:
                break
            node = child
        lengths.update(dict.fromkeys(owners, before))
        return lengths

    def add(self, text: str, owner: Owner) -> None:
        """Record that an owner has seen a text; evict its least recently used nodes above the limit."""
        nodes = self._nodes.get(owner)
        if nodes is None:
            nodes = self._nodes[owner] = OrderedDict()
            self._owner_sets[owner] = frozenset((owner,))
        owner_set, added = self._owner_sets[owner], 0
        path = self._path(text[: self.limit - NODE_COST])
        for node in reversed(path):
            if owner in node.owners:
                nodes.move_to_end(node)
            else:
                node.owners = node.owners | owner_set if node.owners else owner_set
                nodes[node] = None
                added += len(node.edge) + NODE_COST
        self._sizes[owner] = self._sizes.get(owner, 0) + added
        self._shrink(owner, self.limit)
        # Only after the text is added: until then its nodes may have no owner.
        while self._oversized:
            self._shrink(self._oversized.pop(), self.limit)

    def trim(self, share: float) -> None:
        """Evict least recently used nodes until each owner has at most this share of the limit."""
        for owner in self._nodes:
            self._shrink(owner, int(self.limit * share))

    def remove(self, owner: Owner) -> None:
        """Remove an owner."""
        self._shrink(owner, -1)
        self._nodes.pop(owner, None)
        self._sizes.pop(owner, None)
        self._owner_sets.pop(owner, None)

    def _path(self, text: str) -> list[Node[Owner]]:
        """Return the nodes of a text, from the root down; create those that are missing."""
        path: list[Node[Owner]] = []
        node, index, end = self._root, 0, len(text)
        while index < end:
            child = node.children.get(text[index])
            if child is None:
                child = Node(text[index:], node)
                node.add_child(child)
            elif not text.startswith(child.edge, index):
                child = self._split(child, _common_length(text, index, child.edge))
            path.append(child)
            index += len(child.edge)
            node = child
        return path

    def _split(self, lower: Node[Owner], length: int) -> Node[Owner]:
        """Split a node after `length` characters. Its owners now own both parts."""
        parent, edge = lower.parent or self._root, lower.edge
        upper: Node[Owner] = Node(edge[:length], parent)
        upper.owners = lower.owners
        parent.children[edge[0]] = upper
        lower.edge = edge[length:]
        upper.add_child(lower)
        for owner in upper.owners:
            nodes = self._nodes[owner]
            nodes[upper] = None
            self._sizes[owner] += NODE_COST
            # The upper part counts as just used, and so do its ancestors, which come after it.
            above = upper.parent
            while above is not None and above is not self._root:
                nodes.move_to_end(above)
                above = above.parent
        self._oversized |= upper.owners
        return upper

    def _shrink(self, owner: Owner, limit: int) -> None:
        nodes = self._nodes.get(owner)
        if nodes is None:
            return
        size = self._sizes.get(owner, 0)
        while nodes and size > limit:
            node, _ = nodes.popitem(last=False)
            size -= node.cost
            node.owners = node.owners - self._owner_sets[owner]
            if not node.owners and node.parent is not None:
                del node.parent.children[node.edge[0]]
                node.parent = None
        self._sizes[owner] = size


def _common_length(text: str, index: int, edge: str) -> int:
    """Return how many characters the edge and the text from an index on have in common."""
    low, limit = 0, min(len(edge), len(text) - index)
    step = 16
    # Comparing slices is far quicker than comparing characters: double the slice until it differs, then bisect.
    while low < limit and text[index + low : index + low + step] == edge[low : low + step]:
        low += step
        step *= 2
    low, high = min(low, limit), min(low + step, limit)
    while low < high:
        middle = (low + high + 1) // 2
        if text[index + low : index + middle] == edge[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
