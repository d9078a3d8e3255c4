# SPDX-License-Identifier: Apache-2.0
"""Checks the trees of a UBJSON file where they lie, a thousand at a time, if they are written as XGBoost 3 writes them.

Called by `ubjson` for the trees that `xgboost_file` asks for. Their bytes then go to XGBoost as they are, which takes a
tenth of the time of reading and writing them anew. Every byte between the numbers is compared with what XGBoost writes,
so that nothing is there that was not looked at; floats need no check. What differs in any way, good or bad, is `None`
here, and read by `xgboost_file` one tree at a time: trees with categories or several values for each leaf among them.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass

import numpy as np

from headrace.backends.contract import Array

NOWHERE = 2**31 - 1
_AT_ONCE = 1 << 16
"""Nodes: their numbers stay in the processor's cache."""

_COUNT = struct.Struct(">q")


@dataclass(frozen=True, slots=True)
class PackedTrees:
    """Where in a file the trees are that were checked."""

    begin: int
    end: int
    count: int
    columns: int
    """That they were checked for."""


def packed_trees(data: bytearray, position: int, count: int) -> tuple[PackedTrees, int] | None:
    """The trees that begin at `position`, and where they end."""
    # Nothing of it may be left when it returns: data that is looked at cannot change its size.
    with memoryview(data) as view:
        walk = _Walk(data, view, position)
        if count < 1 or not all(map(walk.step, range(count))) or not walk.check():
            return None
        return PackedTrees(position, walk.position, count, walk.columns), walk.position


class _Walk:
    """Goes from tree to tree by their sizes, and checks what it has passed."""

    def __init__(self, data: bytearray, view: memoryview, position: int) -> None:
        self._data = data
        self._view = view
        self.position = position
        self.columns = 0
        self._layouts: dict[int, _Layout] = {}
        self._passed = _Passed()

    def step(self, index: int) -> bool:
        """Pass a tree, unless it is not laid out as it should be."""
        data, view, place = self._data, self._view, self.position
        begins_as = data.startswith
        layout = self._layout(place)
        if layout is None:
            return False
        for piece, offset in layout.before_id:
            if not begins_as(piece, place + offset):
                return False
        number = _id(index)
        if not begins_as(number, place + layout.id_at):
            return False
        after = place + layout.id_at + len(number)
        for piece, offset in layout.after_id:
            if not begins_as(piece, after + offset):
                return False
        nodes, parameters = layout.nodes, after + layout.parameters_at
        if layout.parameters and begins_as(layout.parameters, parameters):
            self.position, deleted = parameters + len(layout.parameters), 0
        else:
            self.position, deleted = self._parameters(parameters, layout)
            if not self.position:
                return False
        default = place + layout.default_at
        bytes_of_whole = 4 * nodes
        left, parents, right, features = layout.whole
        passed = self._passed
        passed.nodes += nodes
        passed.sizes.append(nodes)
        passed.deleted.append(deleted)
        passed.defaults.append(view[default : default + nodes])
        passed.left.append(view[after + left : after + left + bytes_of_whole])
        passed.right.append(view[after + right : after + right + bytes_of_whole])
        passed.parents.append(view[after + parents : after + parents + bytes_of_whole])
        passed.features.append(view[after + features : after + features + bytes_of_whole])
        return passed.nodes < _AT_ONCE or self.check()

    def check(self) -> bool:
        """Whether those that were passed since the last time are trees."""
        passed, self._passed = self._passed, _Passed()
        return passed.are_trees(self.columns)

    def _layout(self, place: int) -> _Layout | None:
        if place + len(_FIRST) + 8 > len(self._data):
            return None
        (nodes,) = _COUNT.unpack_from(self._data, place + len(_FIRST))
        layout = self._layouts.get(nodes)
        # A tree has 37 bytes for each node.
        if layout is None and 1 <= nodes <= (len(self._data) - place) // 37:
            layout = self._layouts[nodes] = _Layout(nodes)
        return layout

    def _parameters(self, place: int, layout: _Layout) -> tuple[int, int]:
        """Where the tree ends, and how many of its nodes were deleted; 0 and 0 where they are not its parameters."""
        data, begin, numbers = self._data, place, []
        for name in _PARAMETERS:
            if not data.startswith(name, place) or place + len(name) >= len(data):
                return 0, 0
            # Eight bytes say how long it is; the last of them is enough for a number.
            place += len(name) + 1
            text = bytes(data[place : place + data[place - 1]])
            if not text.isdigit() or len(text) > 9:
                return 0, 0
            place += len(text)
            numbers.append(int(text))
        deleted, columns, nodes, width = numbers
        self.columns = self.columns or columns
        if columns != self.columns or nodes != layout.nodes or width != 1 or not data.startswith(b"}}", place):
            return 0, 0
        if not deleted:
            layout.parameters = bytes(data[begin : place + 2])
        return place + 2, deleted


class _Passed:
    """Some trees, one after the other, by the numbers that lead from node to node."""

    def __init__(self) -> None:
        self.nodes = 0
        self.sizes: list[int] = []
        self.deleted: list[int] = []
        self.defaults: list[memoryview] = []
        self.left: list[memoryview] = []
        self.right: list[memoryview] = []
        self.parents: list[memoryview] = []
        self.features: list[memoryview] = []

    def are_trees(self, columns: int) -> bool:
        if not self.nodes:
            return True
        left, right, parents = _numbers(self.left), _numbers(self.right), _numbers(self.parents)
        features, defaults = _numbers(self.features), np.frombuffer(b"".join(self.defaults), np.uint8)
        sizes = np.array(self.sizes)
        roots = np.cumsum(sizes) - sizes
        is_split = left != -1
        splits = np.flatnonzero(is_split)
        counts = np.add.reduceat(is_split, roots, dtype=np.int32)
        first = np.repeat(roots.astype(np.int32), counts)
        last = np.repeat((sizes - 1).astype(np.int32), counts)
        own = splits.astype(np.int32) - first
        if defaults.max() > 1 or (parents[roots] != NOWHERE).any() or np.count_nonzero(right != -1) != splits.size:
            return False
        children = []
        for side in (left[splits], right[splits]):
            # Below 0, as numbers without a sign, are above every size.
            if (side == 0).any() or (side.view(np.uint32) > last.view(np.uint32)).any():
                return False
            children.append(side + first)
        # Each child names the one node that it is a child of; so no node is the child of two, and no way down comes back.
        if (children[0] == children[1]).any() or any((parents[child] != own).any() for child in children):
            return False
        deleted = np.array(self.deleted)
        if self.nodes == sizes.size + 2 * splits.size:
            return not deleted.any() and bool((features.view(np.uint32) < columns).all())
        held = np.zeros(self.nodes, np.bool_)
        for reached in (roots, *children):
            held[reached] = True
        return (
            bool((features[held].view(np.uint32) < columns).all())
            and _were_deleted(~held, left, features, defaults)
            and bool((parents[~held].view(np.uint32) < np.repeat(sizes, sizes)[~held]).all())
            and np.array_equal(np.add.reduceat((~held).astype(np.int64), roots), deleted)
        )


def _were_deleted(nodes: Array, left: Array, features: Array, defaults: Array) -> bool:
    """As XGBoost marks nodes that it has pruned."""
    return bool((left[nodes] == -1).all() and (features[nodes] == NOWHERE).all() and (defaults[nodes] == 1).all())


def _numbers(parts: list[memoryview]) -> Array:
    joined = np.frombuffer(bytearray().join(parts), np.dtype(np.int32).newbyteorder("="))
    return joined.byteswap(inplace=True) if sys.byteorder == "little" else joined


def _name(text: str) -> bytes:
    return b"L" + _COUNT.pack(len(text)) + text.encode()


def _id(index: int) -> bytes:
    """XGBoost takes the fewest bytes that it thinks a number needs."""
    if index < 127:
        return _ID + b"i" + index.to_bytes(1, "big")
    if index < 32767:
        return _ID + b"I" + index.to_bytes(2, "big")
    return _ID + b"l" + index.to_bytes(4, "big")


_ID = _name("id")
_FIRST = b"{" + _name("base_weights") + b"[$d#L"
_EMPTY = ("categories", b"l"), ("categories_nodes", b"l"), ("categories_segments", b"L"), ("categories_sizes", b"L")
_ARRAYS = (
    ("left_children", b"l"),
    ("loss_changes", b"d"),
    ("parents", b"l"),
    ("right_children", b"l"),
    ("split_conditions", b"d"),
    ("split_indices", b"l"),
)
_PARAMETERS = tuple(
    before + _name(name) + b"SL" + bytes(7)
    for before, name in (
        (_name("tree_param") + b"{", "num_deleted"),
        (b"", "num_feature"),
        (b"", "num_nodes"),
        (b"", "size_leaf_vector"),
    )
)


class _Layout:
    """Of a tree with so many nodes: what is between the numbers, and where it and they are."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.parameters = b""
        """Once they were seen, without deleted nodes."""
        count = _COUNT.pack(nodes)
        first = _FIRST + count
        empty = b"".join(_name(name) + b"[$" + kind + b"#L" + bytes(8) for name, kind in _EMPTY)
        second = empty + _name("default_left") + b"[$U#L" + count
        self.default_at = len(first) + 4 * nodes + len(second)
        self.id_at = self.default_at + nodes
        self.before_id = ((first, 0), (second, len(first) + 4 * nodes))
        after: list[tuple[bytes, int]] = []
        self.whole: list[int] = []
        place = 0
        for array, kind in _ARRAYS:
            piece = _name(array) + b"[$" + kind + b"#L" + count
            after.append((piece, place))
            place += len(piece)
            if kind == b"l":
                self.whole.append(place)
            place += 4 * nodes
        # All of this one is compared: splits by category are not for here.
        last = _name("split_type") + b"[$U#L" + count + bytes(nodes) + _name("sum_hessian") + b"[$d#L" + count
        after.append((last, place))
        self.after_id = tuple(after)
        self.parameters_at = place + len(last) + 4 * nodes
