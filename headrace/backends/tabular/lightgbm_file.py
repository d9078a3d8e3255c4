# SPDX-License-Identifier: Apache-2.0
"""A reader of LightGBM's text format that checks every line and index, many trees at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from headrace.backends.contract import Array
from headrace.backends.tabular.forest import int64_array

MAX_NUMBER_BYTES = 48
"""Maximum length of a number, in bytes."""

_NUMBER_CHARACTERS = b"0123456789+-.eEinfa "


def check_numbers(lines: Sequence[bytes], counts: Array) -> None:
    """Raise `ValueError` unless each line has its count of numbers."""
    text = b" ".join(lines)
    non_digits = _NonDigits(text)
    _check_tokens(non_digits, lines, counts)
    if not (non_digits.are_well_placed() and non_digits.are_in_order()):
        # Rejects infinities and number formats that LightGBM does not write.
        _check_each(text)


def parse_integers(lines: Sequence[bytes], counts: Array, low: Array, high: Array) -> Array:
    """Parse the numbers of all lines and check each against the range of its line; raise `ValueError` otherwise."""
    text = b" ".join(lines)
    non_digits = _NonDigits(text)
    _check_tokens(non_digits, lines, counts)
    if not non_digits.are_well_placed() or not non_digits.are_integers():
        raise _invalid_line()
    numbers = np.fromstring(text, np.int64, sep=" ")
    if numbers.size != counts.sum():
        raise _invalid_line()
    if (numbers < np.repeat(low, counts)).any() or (numbers > np.repeat(high, counts)).any():
        raise _invalid_line()
    return numbers


class _NonDigits:
    """The non-digit bytes of a text, with a space added at its end."""

    def __init__(self, text: bytes) -> None:
        self._bytes = np.frombuffer(text + b" ", np.uint8)
        self._is_digit = (self._bytes - ord("0")) < 10
        self._places = np.flatnonzero(~self._is_digit)
        self._letters = self._bytes[self._places]
        self._is_space = self._letters == ord(" ")

    def spaces(self) -> Array:
        places: Array = self._places[self._is_space]
        return places

    def are_well_placed(self) -> bool:
        """Return whether the byte before each is right: a digit, or, before a sign, a space or an exponent's letter."""
        letters = self._letters
        # A space precedes the first number, as between numbers; the last byte is not needed.
        before = np.where(self._places > 0, self._bytes[self._places - 1], np.uint8(ord(" ")))
        after_exponent = (before | 32) == ord("e")
        after_digit = (before - ord("0")) < 10
        needs_digit = self._is_space | (letters == ord(".")) | ((letters | 32) == ord("e"))
        good = (needs_digit & after_digit) | ((letters == ord("+")) & after_exponent)
        good |= (letters == ord("-")) & (after_exponent | (before == ord(" ")))
        return bool(good.all())

    def are_integers(self) -> bool:
        return bool((self._is_space | (self._letters == ord("-"))).all())

    def are_in_order(self) -> bool:
        """Return whether each number has at most one point, followed by at most one exponent."""
        left = self._letters.tobytes().replace(b"E", b"e").replace(b"e-", b"e").replace(b"e+", b"e")
        return not (b".." in left or b"e." in left or b"ee" in left)


def _check_tokens(non_digits: _NonDigits, lines: Sequence[bytes], counts: Array) -> None:
    """Check that each line has its count of numbers, and none is too long."""
    ends = non_digits.spaces()
    sizes = np.fromiter(map(len, lines), np.int64, len(lines))
    if (counts < 1).any() or ends.size != counts.sum():
        raise _invalid_line()
    if (ends[np.cumsum(counts) - 1] != np.cumsum(sizes + 1) - 1).any():
        raise _invalid_line()
    if ends[0] > MAX_NUMBER_BYTES or (np.diff(ends) > MAX_NUMBER_BYTES + 1).any():
        raise _invalid_line()


def _check_each(text: bytes) -> None:
    if text.translate(None, _NUMBER_CHARACTERS):
        raise _invalid_line()
    # float() is called for its error.
    for number in text.split(b" "):
        float(number)


def _invalid_line() -> ValueError:
    return ValueError("a line has an invalid number, or a wrong count of numbers")


_LARGEST = 2**31 - 1
_CHUNK_BYTES = 1 << 20
"""Bytes of text per step: the text and its arrays stay in the CPU cache."""
_INTEGER_CHARACTERS = str.maketrans("", "", "0123456789- ")


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
_PLAIN_TREE = re.compile(b"\n".join(name + b"=" + _VALUES.get(name, rb"[^\n]*+") for name in _LINES) + b"\n\n\n")
"""A tree without categories, as LightGBM 4 writes it."""


@dataclass(frozen=True, slots=True)
class _Tree:
    """A tree by its lines."""

    index: int
    leaves: int
    sets: int
    """Number of category sets."""
    linear: int
    fields: Mapping[bytes, bytes]
    shrinkage: bytes


def read_trees(data: bytes | bytearray, begin: int, end: int, columns: int) -> list[bytes]:
    """Return the lines of each tree as LightGBM reads them, with `Tree=` and the two empty lines at its end."""
    written: list[bytes] = []
    waiting: list[_Tree] = []
    for tree, place in _read_plain_trees(data, begin, end):
        waiting.append(tree)
        if place - begin >= _CHUNK_BYTES:
            written += _checked(waiting, columns)
            waiting, begin = [], place
    return written + _checked(waiting, columns)


def _read_plain_trees(data: bytes | bytearray, begin: int, end: int) -> Iterator[tuple[_Tree, int]]:
    """Yield the trees, each with the position of its end."""
    index = 0
    while tree := _PLAIN_TREE.match(data, begin, end):
        number, leaves, *values, shrinkage = tree.groups()
        if int(number) != index:
            raise ValueError("a tree is missing or duplicated")
        yield (
            _Tree(index, int(leaves), 0, 0, dict(zip(_USED, values, strict=True)), shrinkage.rstrip(b" ")),
            tree.end(),
        )
        begin, index = tree.end(), index + 1
    # Starts at the first tree that has another format.
    for part in bytes(data[begin:end]).split(b"\n\n"):
        block = part.strip(b"\n")
        begin += len(part) + 2
        if block:
            yield _tree(block, index), begin
            index += 1


def parse_integer(text: str, low: int, high: int) -> int:
    """Parse an integer."""
    return int(_integers(text, 1, low, high)[0])


def _tree(block: bytes, index: int) -> _Tree:
    fields: dict[bytes, bytes] = {}
    lines = block.split(b"\n")
    for line in lines:
        name, is_field, value = line.partition(b"=")
        if not is_field or name in fields:
            raise ValueError("a line does not belong to a tree, or is duplicated")
        fields[name] = value
    if fields.get(b"Tree") != b"%d" % index:
        raise ValueError("expected a tree")
    return _Tree(
        index,
        _parse_digits(fields[b"num_leaves"], 1),
        _parse_digits(fields[b"num_cat"], 0),
        _parse_digits(fields.get(b"is_linear", b"0"), 0),
        fields,
        fields.get(b"shrinkage", b"1").rstrip(b" "),
    )


def _parse_digits(text: bytes, low: int) -> int:
    """Parse an integer written with digits only."""
    text = text.rstrip(b" ")
    if not text.isdigit() or len(text) > 10 or not low <= int(text) <= _LARGEST:
        raise ValueError("a number is invalid or out of range")
    return int(text)


def _checked(trees: Sequence[_Tree], columns: int) -> list[bytes]:
    if not trees:
        return []
    ones = np.ones(len(trees), np.int64)
    leaves = np.array([tree.leaves for tree in trees])
    if any(tree.linear > 1 for tree in trees) or any(tree.sets for tree in trees if tree.leaves == 1):
        raise ValueError("a tree with one leaf has categories, or is linear in an unknown way")
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
    """Return the additional lines of trees with splits, by tree index."""
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
    parse_integers(texts[b"split_feature"], count, none, np.full_like(count, columns - 1))
    _check_children(
        [parse_integers(texts[name], count, -leaves, count - 1) for name in (b"left_child", b"right_child")], leaves
    )
    by_category = (parse_integers(kinds, count, -1 - most, most) & 1) == 1
    if (np.add.reduceat(by_category, np.cumsum(count) - count, dtype=np.int64) > 0).tolist() != [
        tree.sets > 0 for tree in trees
    ]:
        raise ValueError("a tree's categories do not match its splits")
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
    """Raise an error unless the arrays are trees with their first node as root."""
    count = leaves - 1
    nodes = count + leaves
    first = np.repeat(np.cumsum(nodes) - nodes, count)
    leaf_offset = np.repeat(count, count) - 1
    reached = np.zeros(int(nodes.sum()), np.bool_)
    for side in sides:
        if not side.all():
            raise ValueError("a node's child is the root")
        # A child is a split, or a leaf written as -1 - index. Leaves are numbered after the splits here.
        reached[np.where(side < 0, leaf_offset - side, side) + first] = True
    # Every node has one parent and the root has none, so there is no cycle.
    if np.count_nonzero(reached) != 2 * count.sum():
        raise ValueError("two nodes have the same child")


def _categories(tree: _Tree) -> dict[str, str]:
    fields, sets = tree.fields, tree.sets
    kinds = [int(kind) for kind in _kinds(tree).split()]
    chosen = [float(number) for number in fields[b"threshold"].split()]
    if any(kind & 1 and not 0 <= value < sets for kind, value in zip(kinds, chosen, strict=True)):
        raise ValueError("a split uses missing categories")
    ends = _integers(fields[b"cat_boundaries"].decode(), sets + 1, 0, _LARGEST)
    if ends[0] != 0 or (np.diff(ends) < 0).any():
        raise ValueError("the categories of a split are missing")
    numbers = _integers(fields[b"cat_threshold"].decode(), int(ends[-1]), 0, 2**32 - 1)
    return {"cat_boundaries": _joined(ends), "cat_threshold": _joined(numbers)}


def _linear(tree: _Tree, columns: int) -> dict[str, str]:
    """Parse the leaves of a linear tree, each with columns and their coefficients."""
    fields = {name.decode(): value.decode() for name, value in tree.fields.items()}
    counts = _integers(fields["num_features"], tree.leaves, 0, columns)
    total = int(counts.sum())
    # A leaf without columns is empty, which leaves more than one space in the line.
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
        "leaf_features": _joined(_integers(features, total, 0, columns - 1)),
        "leaf_coeff": coefficients,
    }


def _written(lines: Mapping[str, str]) -> bytes:
    return "".join(f"{name}={value}\n" for name, value in lines.items()).encode()


def _integers(text: str, count: int, low: int, high: int) -> Array:
    tokens = text.rstrip(" ").split(" ") if count else []
    if (
        len(tokens) != count
        or text.translate(_INTEGER_CHARACTERS)
        or max(map(len, tokens), default=0) > MAX_NUMBER_BYTES
    ):
        raise ValueError("a line has an invalid number, or a wrong count of numbers")
    return int64_array(np.array(list(map(int, tokens)), np.int64), count, low, high)


def _joined(numbers: Any) -> str:
    return " ".join(map(str, numbers.tolist()))


CHECKS = 1
"""Raise this with every change of what this module or `forest` accepts."""

MAX_COLUMNS = 1 << 24
MAX_CLASSES = 1 << 16

_OBJECTIVE = re.compile(r"[a-z_0-9]+(?: [a-z_]+(?::[0-9.eE+-]{1,32})?)*", re.ASCII)
_NAME = re.compile(r"[^\s=]+")
# No NUL: LightGBM takes it for the end of the text and then answers like a model without trees.
_INFO = re.compile(r"none|\[[^\s\]\0]+\]|-?\d+(?::-?\d+)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class BoosterText:
    """The parsed and checked content of a file."""

    objective: str
    """The first word of the objective; "" if there is none."""
    columns: int
    column_names: tuple[str, ...]
    classes: int
    """Trees per round, which is the number of scores per row."""
    rounds: int
    content: bytes | memoryview
    """The checked text, as LightGBM reads it."""


def read_booster(data: bytes | bytearray) -> BoosterText:
    """Parse and check a model. Raise `ValueError` (or `KeyError` for a missing line) if it is invalid."""
    if data.startswith(b"tree\r\n"):
        data = data.replace(b"\r\n", b"\n")
    end = data.rfind(b"\nend of trees\n")
    if end < 0 or not data.startswith(b"tree\n"):
        raise ValueError("it does not begin with 'tree', or has no 'end of trees'")
    # Includes the empty line that ends the last tree.
    end += 1
    begin = data.find(b"\n\n", 0, end)
    if begin < 0:
        raise ValueError("it has no tree")
    head, flags = _head(data[:begin].decode().removeprefix("tree\n"))
    columns = parse_integer(head["max_feature_idx"], 0, MAX_COLUMNS - 1) + 1
    classes = parse_integer(head["num_class"], 1, MAX_CLASSES)
    per_round = parse_integer(head["num_tree_per_iteration"], 1, MAX_CLASSES)
    if per_round not in (1, classes):
        raise ValueError("the number of trees per round differs from the number of classes")
    names = tuple(head["feature_names"].split(" "))
    infos = head["feature_infos"].strip().split(" ")
    if len(names) != columns or len(infos) != columns or len(set(names)) != columns:
        raise ValueError("the number of names differs from the number of columns")
    if not all(_NAME.fullmatch(name) for name in names) or not all(_INFO.fullmatch(info) for info in infos):
        raise ValueError("a column's name or range is invalid")
    objective = head.get("objective", "")
    if objective and not _OBJECTIVE.fullmatch(objective):
        raise ValueError("its objective is none")
    _check_classes(objective, classes)
    trees = read_trees(data, begin + 2, end, columns)
    if not trees or len(trees) % per_round:
        raise ValueError("it has no trees, or an incomplete round")
    lines = [
        "tree",
        "version=v4",
        f"num_class={classes}",
        f"num_tree_per_iteration={per_round}",
        "label_index=0",
        f"max_feature_idx={columns - 1}",
        *([f"objective={objective}"] if objective else []),
        *(["average_output"] if "average_output" in flags else []),
        f"feature_names={' '.join(f'Column_{index}' for index in range(columns))}",
        f"feature_infos={' '.join(infos)}",
        f"tree_sizes={' '.join(str(len(tree)) for tree in trees)}",
    ]
    front = "\n".join(lines) + "\n\n"
    content = b"".join([front.encode(), *trees, b"end of trees\n\nparameters:\n\nend of parameters\n"])
    return BoosterText(objective.partition(" ")[0], columns, names, per_round, len(trees) // per_round, content)


def facts_of(text: BoosterText) -> tuple[dict[str, Any], bytes]:
    """Return what `recall_booster` needs."""
    return {name: getattr(text, name) for name in _FACTS}, bytes(text.content)


def recall_booster(_data: bytearray, facts: Mapping[str, Any], content: memoryview) -> BoosterText:
    """Return the result of `read_booster` for data that it has read before."""
    names = tuple(facts["column_names"])
    return BoosterText(**{**{name: facts[name] for name in _FACTS}, "column_names": names}, content=content)


_FACTS = tuple(field.name for field in fields(BoosterText) if field.name != "content")

READ_ERRORS: tuple[type[Exception], ...] = (ValueError, KeyError, TypeError)
"""Exceptions that `read_booster` raises for a damaged file. UnicodeDecodeError is a ValueError."""


def _head(block: str) -> tuple[dict[str, str], set[str]]:
    fields: dict[str, str] = {}
    flags = set()
    for line in block.split("\n"):
        name, is_field, value = line.partition("=")
        if not is_field:
            flags.add(name)
        elif name in fields:
            raise ValueError("a line is there twice")
        else:
            fields[name] = value
    return fields, flags


def _check_classes(objective: str, classes: int) -> None:
    num_class = re.search(r" num_class:(\d{1,8})", objective)
    if (objective and objective.startswith("multiclass") != (classes > 1)) or (
        num_class and int(num_class[1]) != classes
    ):
        raise ValueError("its objective and the model differ in the number of classes")
