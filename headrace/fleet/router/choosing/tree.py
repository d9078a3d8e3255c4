# SPDX-License-Identifier: Apache-2.0
"""Texts seen lately, by prefix, and who has seen which: one radix tree for all users, bounded for each. Pure.

Kept by `cache_aware`, whose users are backends. Who has a node has all above it. What a user has is kept in the order of
use, a node after everything below it, so that the first is always a leaf of theirs and the one used longest ago.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from typing import Any, Generic, TypeVar

User = TypeVar("User", bound=Hashable)

NODE_COST = 64
"""What a node counts for beside its characters: else a tree of single characters would outgrow every bound."""


_NOTHING: dict[str, Any] = {}
"""Never added to (`Node.adopt`)."""
_NOBODY: frozenset[Any] = frozenset()


class Node(Generic[User]):
    """What follows a prefix, up to where texts part."""

    __slots__ = ("children", "edge", "parent", "users")

    def __init__(self, edge: str, parent: Node[User] | None) -> None:
        self.edge = edge
        self.parent = parent
        # Most nodes are leaves of one user: these share what they can, as there are very many.
        self.children: dict[str, Node[User]] = _NOTHING
        self.users: frozenset[User] = _NOBODY

    def adopt(self, child: Node[User]) -> None:
        """Have the child follow it."""
        if self.children is _NOTHING:
            self.children = {}
        self.children[child.edge[0]] = child
        child.parent = self

    @property
    def cost(self) -> int:
        """What it counts for."""
        return len(self.edge) + NODE_COST


class PrefixTree(Generic[User]):
    """See the module."""

    def __init__(self, most: int) -> None:
        self.most = max(most, 2 * NODE_COST)
        """What each user's part may count for."""
        self._root: Node[User] = Node("", None)
        self._held: dict[User, OrderedDict[Node[User], None]] = {}
        self._sizes: dict[User, int] = {}
        self._alone: dict[User, frozenset[User]] = {}
        self._crowded: set[User] = set()
        """Who may have too much since a node of theirs was split."""

    def size(self, user: User) -> int:
        """What the user's part counts for."""
        return self._sizes.get(user, 0)

    def longest(self, text: str, among: Collection[User]) -> tuple[int, list[User]]:
        """How many first characters of the text somebody among these has seen, at most, and who has. Changes nothing."""
        best: tuple[int, list[User]] = (0, [])
        node, place = self._root, 0
        while True:
            child = node.children.get(text[place : place + 1])
            if child is None:
                return best
            users = [user for user in among if user in child.users]
            if not users:
                return best
            whole = text.startswith(child.edge, place)
            place += len(child.edge) if whole else _common(text, place, child.edge)
            best = (place, users)
            if not whole:
                return best
            node = child

    def add(self, text: str, user: User) -> None:
        """The user has now seen this text; what they have seen longest ago is forgotten if it is too much."""
        held = self._held.get(user)
        if held is None:
            held = self._held[user] = OrderedDict()
            self._alone[user] = frozenset((user,))
        alone, added = self._alone[user], 0
        path = self._path(text[: self.most - NODE_COST])
        for node in reversed(path):
            if user in node.users:
                held.move_to_end(node)
            else:
                node.users = node.users | alone if node.users else alone
                held[node] = None
                added += len(node.edge) + NODE_COST
        self._sizes[user] = self._sizes.get(user, 0) + added
        self._shrink(user, self.most)
        # Not before the text is in: until then, what it is made of may be nobody else's.
        while self._crowded:
            self._shrink(self._crowded.pop(), self.most)

    def trim(self, share: float) -> None:
        """Forget what was used longest ago until each user's part is at most this share of what it may be."""
        for user in self._held:
            self._shrink(user, int(self.most * share))

    def forget(self, user: User) -> None:
        """The user is gone."""
        self._shrink(user, -1)
        self._held.pop(user, None)
        self._sizes.pop(user, None)
        self._alone.pop(user, None)

    def _path(self, text: str) -> list[Node[User]]:
        """The nodes that make up the text, from the top; those that are missing are made."""
        path: list[Node[User]] = []
        node, place, end = self._root, 0, len(text)
        while place < end:
            child = node.children.get(text[place])
            if child is None:
                child = Node(text[place:], node)
                node.adopt(child)
            elif not text.startswith(child.edge, place):
                child = self._split(child, _common(text, place, child.edge))
            path.append(child)
            place += len(child.edge)
            node = child
        return path

    def _split(self, lower: Node[User], length: int) -> Node[User]:
        """Make a node of the first characters of one. Its users now have two."""
        parent, edge = lower.parent or self._root, lower.edge
        upper: Node[User] = Node(edge[:length], parent)
        upper.users = lower.users
        parent.children[edge[0]] = upper
        lower.edge = edge[length:]
        upper.adopt(lower)
        for user in upper.users:
            held = self._held[user]
            held[upper] = None
            self._sizes[user] += NODE_COST
            # It counts as just used: so must all above it, which have to come after it.
            above = upper.parent
            while above is not None and above is not self._root:
                held.move_to_end(above)
                above = above.parent
        self._crowded |= upper.users
        return upper

    def _shrink(self, user: User, most: int) -> None:
        held = self._held.get(user)
        if held is None:
            return
        size = self._sizes.get(user, 0)
        while held and size > most:
            node, _ = held.popitem(last=False)
            size -= node.cost
            node.users = node.users - self._alone[user]
            if not node.users and node.parent is not None:
                del node.parent.children[node.edge[0]]
                node.parent = None
        self._sizes[user] = size


def _common(text: str, place: int, edge: str) -> int:
    """How many first characters the edge and the text from a place on have in common."""
    low, most = 0, min(len(edge), len(text) - place)
    step = 16
    # Comparing slices is far quicker than comparing characters: longer ones until they differ, then by halves.
    while low < most and text[place + low : place + low + step] == edge[low : low + step]:
        low += step
        step *= 2
    low, high = min(low, most), min(low + step, most)
    while low < high:
        middle = (low + high + 1) // 2
        if text[place + low : place + middle] == edge[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
