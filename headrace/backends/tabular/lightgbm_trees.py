# SPDX-License-Identifier: Apache-2.0
"""The trees of LightGBM's text format: checks every line and index in them, many trees at a time.

Called by `lightgbm_text` with the lines of each tree. What was checked is handed on as it was written; the lines that
are for people and for training, such as gains and counts, are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.backends.contract import Array
from headrace.backends.tabular.lightgbm_numbers import LONGEST, check_numbers, whole_of
from headrace.backends.tabular.trees import whole_numbers

_LARGEST = 2**31 - 1
_AT_ONCE = 1 << 20
"""Bytes of text: they and what is made of them stay in the processor's cache."""
_OF_WHOLE = str.maketrans("", "", "0123456789- ")


_USED = (b"split_feature", b"threshold", b"decision_type", b"left_child", b"right_child", b"leaf_value")
_LINES = (
    *(b"Tree", b"num_leaves", b"num_cat", b"split_feature", b"split_gain", b"threshold", b"decision_type"),
    *(b"left_child", b"right_child", b"leaf_value", b"leaf_weight", b"leaf_count"),
    *(b"internal_value", b"internal_weight", b"internal_count", b"is_linear", b"shrinkage"),
)
_VALUES = {
    b"Tree": rb"(\d{1,9}+)",
    b"num_leaves": rb"([1-9]\d{0,8}+)",
    b"num_cat": b"0",
    b"is_linear": b"0",
    b"shrinkage": rb"([^\n]*+)",
    **dict.fromkeys(_USED, rb"([^\n]*+)"),
}
_USUAL = re.compile(b"\n".join(name + b"=" + _VALUES.get(name, rb"[^\n]*+") for name in _LINES) + b"\n\n\n")
"""A tree as LightGBM 4 writes those without categories."""


@dataclass(frozen=True, slots=True)
class _Tree:
    """One of them, by its lines."""

    index: int
    leaves: int
    sets: int
    """Of categories."""
    linear: int
    fields: Mapping[bytes, bytes]
    shrinkage: bytes


def read_trees(data: bytes | bytearray, begin: int, end: int, columns: int) -> list[bytes]:
    """The lines of each tree as LightGBM reads them, with `Tree=` and the two empty ones at its end."""
    written: list[bytes] = []
    waiting: list[_Tree] = []
    for tree, place in _found(data, begin, end):
        waiting.append(tree)
        if place - begin >= _AT_ONCE:
            written += _checked(waiting, columns)
            waiting, begin = [], place
    return written + _checked(waiting, columns)


def _found(data: bytes | bytearray, begin: int, end: int) -> Iterator[tuple[_Tree, int]]:
    """The trees, each with where it ends."""
    index = 0
    while found := _USUAL.match(data, begin, end):
        number, leaves, *values, shrinkage = found.groups()
        if int(number) != index:
            raise ValueError("a tree is missing, or there twice")
        yield (
            _Tree(index, int(leaves), 0, 0, dict(zip(_USED, values, strict=True)), shrinkage.rstrip(b" ")),
            found.end(),
        )
        begin, index = found.end(), index + 1
    # From the first one on that is written another way.
    for part in bytes(data[begin:end]).split(b"\n\n"):
        block = part.strip(b"\n")
        begin += len(part) + 2
        if block:
            yield _tree(block, index), begin
            index += 1


def one(text: str, low: int, high: int) -> int:
    """A whole number."""
    return int(_whole(text, 1, low, high)[0])


def _tree(block: bytes, index: int) -> _Tree:
    fields: dict[bytes, bytes] = {}
    lines = block.split(b"\n")
    for line in lines:
        name, is_field, value = line.partition(b"=")
        if not is_field or name in fields:
            raise ValueError("a line is none of a tree's, or there twice")
        fields[name] = value
    if fields.get(b"Tree") != b"%d" % index:
        raise ValueError("a tree is expected, and there is something else")
    return _Tree(
        index,
        _small(fields[b"num_leaves"], 1),
        _small(fields[b"num_cat"], 0),
        _small(fields.get(b"is_linear", b"0"), 0),
        fields,
        fields.get(b"shrinkage", b"1").rstrip(b" "),
    )


def _small(text: bytes, low: int) -> int:
    """A whole number that is written with digits only."""
    text = text.rstrip(b" ")
    if not text.isdigit() or len(text) > 10 or not low <= int(text) <= _LARGEST:
        raise ValueError("a number is not one, or too small or large")
    return int(text)


def _checked(trees: Sequence[_Tree], columns: int) -> list[bytes]:
    if not trees:
        return []
    ones = np.ones(len(trees), np.int64)
    leaves = np.array([tree.leaves for tree in trees])
    if any(tree.linear > 1 for tree in trees) or any(tree.sets for tree in trees if tree.leaves == 1):
        raise ValueError("a tree of one leaf has categories, or is linear in a way that is not known")
    check_numbers([tree.shrinkage for tree in trees], ones)
    values = [tree.fields[b"leaf_value"].rstrip(b" ") for tree in trees]
    check_numbers(values, leaves)
    lines = _split_lines([tree for tree in trees if tree.leaves > 1], columns)
    return [
        b"Tree=%d\nnum_leaves=%d\nnum_cat=%d\nleaf_value=%s\n%s%sis_linear=%d\nshrinkage=%s\n\n\n"
        % (
            tree.index,
            tree.leaves,
            tree.sets,
            value,
            lines.get(tree.index, b""),
            _written(_linear(tree, columns)) if tree.linear else b"",
            tree.linear,
            tree.shrinkage,
        )
        for tree, value in zip(trees, values, strict=True)
    ]


def _split_lines(trees: Sequence[_Tree], columns: int) -> dict[int, bytes]:
    """What a tree with splits has besides, by its index."""
    if not trees:
        return {}
    leaves = np.array([tree.leaves for tree in trees])
    count = leaves - 1
    thresholds = [tree.fields[b"threshold"].rstrip(b" ") for tree in trees]
    check_numbers(thresholds, count)
    none, most = np.zeros_like(count), np.full_like(count, 127)
    texts = {
        name: [tree.fields[name].rstrip(b" ") for tree in trees]
        for name in (b"split_feature", b"left_child", b"right_child")
    }
    kinds = [_kinds(tree).rstrip(b" ") for tree in trees]
    whole_of(texts[b"split_feature"], count, none, np.full_like(count, columns - 1))
    _check_children(
        [whole_of(texts[name], count, -leaves, count - 1) for name in (b"left_child", b"right_child")], leaves
    )
    by_category = (whole_of(kinds, count, -1 - most, most) & 1) == 1
    if (np.add.reduceat(by_category, np.cumsum(count) - count, dtype=np.int64) > 0).tolist() != [
        tree.sets > 0 for tree in trees
    ]:
        raise ValueError("a tree has categories that no split uses, or the other way round")
    parts = zip(
        trees, thresholds, texts[b"split_feature"], kinds, texts[b"left_child"], texts[b"right_child"], strict=True
    )
    return {
        tree.index: b"threshold=%s\nsplit_feature=%s\ndecision_type=%s\nleft_child=%s\nright_child=%s\n%s"
        % (threshold, feature, kind, left, right, _written(_categories(tree)) if tree.sets else b"")
        for tree, threshold, feature, kind, left, right in parts
    }


def _kinds(tree: _Tree) -> bytes:
    return tree.fields.get(b"decision_type") or b" ".join([b"0"] * (tree.leaves - 1))


def _check_children(sides: Sequence[Array], leaves: Array) -> None:
    """Refuse what are no trees from their first node down."""
    count = leaves - 1
    nodes = count + leaves
    first = np.repeat(np.cumsum(nodes) - nodes, count)
    behind = np.repeat(count, count) - 1
    reached = np.zeros(int(nodes.sum()), np.bool_)
    for side in sides:
        if not side.all():
            raise ValueError("a node's child is the root")
        # A child is a split, or a leaf as -1 - its number: put behind the splits, all are nodes of one tree.
        reached[np.where(side < 0, behind - side, side) + first] = True
    # With one parent each, and none for the root, no way down can come back to where it was.
    if np.count_nonzero(reached) != 2 * count.sum():
        raise ValueError("two nodes have the same child")


def _categories(tree: _Tree) -> dict[str, str]:
    fields, sets = tree.fields, tree.sets
    kinds = [int(kind) for kind in _kinds(tree).split()]
    chosen = [float(number) for number in fields[b"threshold"].split()]
    if any(kind & 1 and not 0 <= value < sets for kind, value in zip(kinds, chosen, strict=True)):
        raise ValueError("a split uses categories that are not there")
    ends = _whole(fields[b"cat_boundaries"].decode(), sets + 1, 0, _LARGEST)
    if ends[0] != 0 or (np.diff(ends) < 0).any():
        raise ValueError("the categories of a split are not there")
    numbers = _whole(fields[b"cat_threshold"].decode(), int(ends[-1]), 0, 2**32 - 1)
    return {"cat_boundaries": _joined(ends), "cat_threshold": _joined(numbers)}


def _linear(tree: _Tree, columns: int) -> dict[str, str]:
    """The leaves of a linear tree, each with columns and their coefficients."""
    fields = {name.decode(): value.decode() for name, value in tree.fields.items()}
    counts = _whole(fields["num_features"], tree.leaves, 0, columns)
    total = int(counts.sum())
    # Empty for a leaf without columns, which leaves more than one space in the line.
    features, coefficients = (" ".join(fields[name].split()) for name in ("leaf_features", "leaf_coeff"))
    constants = fields["leaf_const"].rstrip(" ")
    check_numbers([constants.encode()], np.array([tree.leaves]))
    if total:
        check_numbers([coefficients.encode()], np.array([total]))
    elif coefficients:
        raise ValueError("a leaf has coefficients for no columns")
    return {
        "leaf_const": constants,
        "num_features": _joined(counts),
        "leaf_features": _joined(_whole(features, total, 0, columns - 1)),
        "leaf_coeff": coefficients,
    }


def _written(lines: Mapping[str, str]) -> bytes:
    return "".join(f"{name}={value}\n" for name, value in lines.items()).encode()


def _whole(text: str, count: int, low: int, high: int) -> Array:
    tokens = text.rstrip(" ").split(" ") if count else []
    if len(tokens) != count or text.translate(_OF_WHOLE) or max(map(len, tokens), default=0) > LONGEST:
        raise ValueError("a line of numbers has something else in it, or more or fewer of them than it must")
    return whole_numbers(np.array(list(map(int, tokens)), np.int64), count, low, high)


def _joined(numbers: Any) -> str:
    return " ".join(map(str, numbers.tolist()))
