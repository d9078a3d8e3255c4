# SPDX-License-Identifier: Apache-2.0
"""Reads LightGBM's text format, and checks every line and index in it.

Called by `backends.tabular.lightgbm`. LightGBM looks for the next `=` or line end past the end of a text that was cut
short, and ends the process where a number is none: with 175 of 300 copies of a small model with a few bytes changed. So
nothing of a file reaches LightGBM but lines that were checked here and in `lightgbm_trees`. Line ends that Git has changed
are mended. Training parameters and pandas' categories are left out: no prediction from numbers uses them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from headrace.backends.tabular.lightgbm_trees import one, read_trees

CHECKS = 1
"""To be raised with every change of what is let through, here, in `lightgbm_trees`, `lightgbm_numbers` and `trees`."""

MOST_COLUMNS = 1 << 24
MOST_CLASSES = 1 << 16

_OBJECTIVE = re.compile(r"[a-z_0-9]+(?: [a-z_]+(?::[0-9.eE+-]{1,32})?)*", re.ASCII)
_NAME = re.compile(r"[^\s=]+")
# No NUL: LightGBM takes it for the end of the text, and answers as a model without trees does.
_INFO = re.compile(r"none|\[[^\s\]\0]+\]|-?\d+(?::-?\d+)*", re.ASCII)


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
    content: bytes | memoryview
    """All of it, checked, as LightGBM reads it."""


def read_booster(data: bytes | bytearray) -> BoosterText:
    """Raises `ValueError` (or `KeyError`, for a line that is missing) for what is no model."""
    if data.startswith(b"tree\r\n"):
        data = data.replace(b"\r\n", b"\n")
    end = data.rfind(b"\nend of trees\n")
    if end < 0 or not data.startswith(b"tree\n"):
        raise ValueError("it does not begin with 'tree', or has no 'end of trees'")
    # With the empty line that ends the last tree.
    end += 1
    begin = data.find(b"\n\n", 0, end)
    if begin < 0:
        raise ValueError("it has no tree")
    head, flags = _head(data[:begin].decode().removeprefix("tree\n"))
    columns = one(head["max_feature_idx"], 0, MOST_COLUMNS - 1) + 1
    classes = one(head["num_class"], 1, MOST_CLASSES)
    per_round = one(head["num_tree_per_iteration"], 1, MOST_CLASSES)
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
    trees = read_trees(data, begin + 2, end, columns)
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
    front = "\n".join(lines) + "\n\n"
    content = b"".join([front.encode(), *trees, b"end of trees\n\nparameters:\n\nend of parameters\n"])
    return BoosterText(objective.partition(" ")[0], columns, names, per_round, len(trees) // per_round, content)


def facts_of(text: BoosterText) -> tuple[dict[str, Any], bytes]:
    """What `recall_booster` needs."""
    return {name: getattr(text, name) for name in _FACTS}, bytes(text.content)


def recall_booster(_data: bytearray, facts: Mapping[str, Any], content: memoryview) -> BoosterText:
    """As `read_booster`, of data that it has read before."""
    names = tuple(facts["column_names"])
    return BoosterText(**{**{name: facts[name] for name in _FACTS}, "column_names": names}, content=content)


_FACTS = tuple(field.name for field in fields(BoosterText) if field.name != "content")

READ_ERRORS: tuple[type[Exception], ...] = (ValueError, KeyError, TypeError)
"""What `read_booster` raises for a damaged file. UnicodeDecodeError is a ValueError."""


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
    told = re.search(r" num_class:(\d{1,8})", objective)
    if (objective and objective.startswith("multiclass") != (classes > 1)) or (told and int(told[1]) != classes):
        raise ValueError("its objective has another number of classes than the model")
