# SPDX-License-Identifier: Apache-2.0
"""Reads LightGBM's text format, and checks every line and index in it.

Called by `backends.tabular.lightgbm`. LightGBM looks for the next `=` or line end past the end of a text that was cut
short, and ends the process where a number is none: with 175 of 300 copies of a small model with a few bytes changed. So
nothing of a file reaches LightGBM but what was checked here, written anew, which also mends files whose line ends Git has
changed. Training parameters and pandas' categories are left out: no prediction from numbers uses them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.backends.contract import Array
from headrace.backends.tabular.trees import check_tree, whole_numbers

MOST_COLUMNS = 1 << 24
MOST_CLASSES = 1 << 16
_LARGEST = 2**31 - 1

# What numbers are written with; Python takes more, such as 1_000.
_OF_NUMBERS = str.maketrans("", "", "0123456789+-.eEinfa ")
_OF_WHOLE = str.maketrans("", "", "0123456789- ")
_LONGEST = 48
_OBJECTIVE = re.compile(r"[a-z_0-9]+(?: [a-z_]+(?::[0-9.eE+-]{1,32})?)*", re.ASCII)
_NAME = re.compile(r"[^\s=]+")
_INFO = re.compile(r"none|\[[^\s\]]+\]|-?\d+(?::-?\d+)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class BoosterText:
    """What a file has."""

    objective: str
    """Its first word; "" where there is none."""
    columns: int
    column_names: tuple[str, ...]
    classes: int
    """Trees of each round: numbers for each row."""
    rounds: int
    content: str
    """All of it, checked, as LightGBM reads it."""


def read_booster(data: bytes) -> BoosterText:
    """Raises `ValueError` (or `KeyError`, for a line that is missing) for what is no model."""
    text = data.decode().replace("\r\n", "\n")
    front, end, _ = text.partition("\nend of trees\n")
    if not end or not front.startswith("tree\n"):
        raise ValueError("it does not begin with 'tree', or has no 'end of trees'")
    blocks = front.split("\n\n")
    head, flags = _fields(blocks[0].removeprefix("tree\n"))
    columns = _one(head["max_feature_idx"], 0, MOST_COLUMNS - 1) + 1
    classes = _one(head["num_class"], 1, MOST_CLASSES)
    per_round = _one(head["num_tree_per_iteration"], 1, MOST_CLASSES)
    if per_round not in (1, classes):
        raise ValueError("it has another number of trees in a round than of classes")
    names = tuple(head["feature_names"].split(" "))
    infos = head["feature_infos"].strip().split(" ")
    if len(names) != columns or len(infos) != columns or len(set(names)) != columns:
        raise ValueError("it has other names than columns")
    if not all(_NAME.fullmatch(name) for name in names) or not all(_INFO.fullmatch(info) for info in infos):
        raise ValueError("a column's name or range is not one")
    objective = head.get("objective", "")
    if objective and not _OBJECTIVE.fullmatch(objective):
        raise ValueError("its objective is none")
    _check_classes(objective, classes)
    trees = [_tree(block, index, columns) for index, block in enumerate(_tree_blocks(blocks[1:]))]
    if not trees or len(trees) % per_round:
        raise ValueError("it has no tree, or not as many in each round")
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
    content = "\n".join(lines) + "\n\n" + "".join(trees) + "end of trees\n\nparameters:\n\nend of parameters\n"
    return BoosterText(objective.partition(" ")[0], columns, names, per_round, len(trees) // per_round, content)


READ_ERRORS: tuple[type[Exception], ...] = (ValueError, KeyError)
"""What `read_booster` raises for a damaged file. UnicodeDecodeError is a ValueError."""


def _tree_blocks(blocks: list[str]) -> list[str]:
    # Trees have two empty lines between them.
    return [block.strip("\n") for block in blocks if block.strip("\n")]


def _fields(block: str) -> tuple[dict[str, str], set[str]]:
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
    told = re.search(r" num_class:(\d{1,8})", objective)
    if (objective and objective.startswith("multiclass") != (classes > 1)) or (told and int(told[1]) != classes):
        raise ValueError("its objective has another number of classes than the model")


def _tree(block: str, index: int, columns: int) -> str:
    """The lines of one tree, with `Tree=` and the two empty ones at its end."""
    fields, flags = _fields(block)
    if flags or fields.get("Tree") != str(index):
        raise ValueError("a tree is expected, and there is something else")
    leaves = _one(fields["num_leaves"], 1, _LARGEST)
    sets = _one(fields["num_cat"], 0, _LARGEST)
    linear = _one(fields.get("is_linear", "0"), 0, 1)
    written = {"num_leaves": str(leaves), "num_cat": str(sets)}
    # The other lines, such as gains and counts, are for people and for training: left out.
    written["leaf_value"] = _numbers(fields["leaf_value"], leaves)
    if leaves > 1:
        written["threshold"] = _numbers(fields["threshold"], leaves - 1)
        written |= _splits(fields, leaves, columns, sets)
    elif sets:
        raise ValueError("a tree of one leaf has categories")
    if linear:
        written |= _linear(fields, leaves, columns)
    written["is_linear"] = str(linear)
    written["shrinkage"] = _numbers(fields.get("shrinkage", "1"), 1)
    return f"Tree={index}\n" + "".join(f"{name}={value}\n" for name, value in written.items()) + "\n\n"


def _splits(fields: Mapping[str, str], leaves: int, columns: int, sets: int) -> dict[str, str]:
    count = leaves - 1
    features = _whole(fields["split_feature"], count, 0, columns - 1)
    kinds = _whole(fields.get("decision_type", " ".join("0" * count)), count, -128, 127)
    # A child is a split, or a leaf as -1 - its number: put behind the splits, all are nodes of one tree.
    left = _whole(fields["left_child"], count, -leaves, count - 1)
    right = _whole(fields["right_child"], count, -leaves, count - 1)
    nodes = [np.where(child < 0, count - 1 - child, child) for child in (left, right)]
    check_tree(nodes[0], nodes[1], features, count + leaves, columns)
    written = {
        "split_feature": _joined(features),
        "decision_type": _joined(kinds),
        "left_child": _joined(left),
        "right_child": _joined(right),
    }
    by_category = (kinds & 1) == 1
    if by_category.any() != bool(sets):
        raise ValueError("a tree has categories that no split uses, or the other way round")
    if sets:
        chosen = [float(number) for number in fields["threshold"].split()]
        if any(not 0 <= chosen[split] < sets for split in np.flatnonzero(by_category)):
            raise ValueError("a split uses categories that are not there")
        ends = _whole(fields["cat_boundaries"], sets + 1, 0, _LARGEST)
        if ends[0] != 0 or (np.diff(ends) < 0).any():
            raise ValueError("the categories of a split are not there")
        written["cat_boundaries"] = _joined(ends)
        written["cat_threshold"] = _joined(_whole(fields["cat_threshold"], int(ends[-1]), 0, 2**32 - 1))
    return written


def _linear(fields: Mapping[str, str], leaves: int, columns: int) -> dict[str, str]:
    """The leaves of a linear tree, each with columns and their coefficients."""
    counts = _whole(fields["num_features"], leaves, 0, columns)
    total = int(counts.sum())
    return {
        "leaf_const": _numbers(fields["leaf_const"], leaves),
        "num_features": _joined(counts),
        # Empty for a leaf without columns, which leaves more than one space in the line.
        "leaf_features": _joined(_whole(_single_spaces(fields["leaf_features"]), total, 0, columns - 1)),
        "leaf_coeff": _numbers(_single_spaces(fields["leaf_coeff"]), total),
    }


def _single_spaces(text: str) -> str:
    return " ".join(text.split())


def _numbers(text: str, count: int) -> str:
    """The text again, if it is so many numbers."""
    # `float` is for its error; the text is handed on, so that no digit is lost.
    list(map(float, _tokens(text, count, _OF_NUMBERS)))
    return text.rstrip(" ") if count else ""


def _whole(text: str, count: int, low: int, high: int) -> Array:
    numbers = np.array(list(map(int, _tokens(text, count, _OF_WHOLE))), np.int64)
    return whole_numbers(numbers, count, low, high)


def _tokens(text: str, count: int, letters: dict[int, int | None]) -> list[str]:
    tokens = text.rstrip(" ").split(" ") if count else []
    if len(tokens) != count or text.translate(letters) or max(map(len, tokens), default=0) > _LONGEST:
        raise ValueError("a line of numbers has something else in it, or more or fewer of them than it must")
    return tokens


def _one(text: str, low: int, high: int) -> int:
    return int(_whole(text, 1, low, high)[0])


def _joined(numbers: Any) -> str:
    return " ".join(map(str, numbers.tolist()))
