# SPDX-License-Identifier: Apache-2.0
"""Reads XGBoost's two formats, JSON and UBJSON, and checks every index in them.

Called by `backends.tabular.xgboost`. XGBoost trusts its files: of 300 copies of a small model with a few bytes changed, 33
ended the process with a signal. So nothing of a file reaches XGBoost but what was checked here: written anew, or, for the
trees of a UBJSON file, as they are when `xgboost_trees` has looked at every byte of them that matters. JSON takes XGBoost
20 times as long to read as UBJSON, so what was JSON is given to it as UBJSON too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from headrace.backends.contract import Array
from headrace.backends.tabular import ubjson
from headrace.backends.tabular.trees import check_tree, whole_numbers
from headrace.backends.tabular.xgboost_trees import NOWHERE, PackedTrees, packed_trees

CHECKS = 1
"""To be raised with every change of what is let through, here, in `xgboost_trees`, `trees` and `ubjson`."""

MOST_COLUMNS = 1 << 24
MOST_GROUPS = 1 << 16
MOST_NODES = 1 << 30
_MOST_CATEGORIES = 1 << 24
_PER_NODE = ("loss_changes", "split_conditions", "sum_hessian")


@dataclass(frozen=True, slots=True)
class BoosterFile:
    """What a file has."""

    booster: str
    """gbtree, dart or gblinear."""
    objective: str
    columns: int
    column_names: tuple[str, ...]
    """None, or one for each column."""
    groups: int
    """Numbers for each row: classes, or targets."""
    targets: int
    best_iteration: int | None
    """Of a training that stopped early: what comes after it is not used by XGBoost's own classes either."""
    rounds: int
    content: bytearray
    """All of it, checked, as XGBoost reads it."""
    trees: PackedTrees | None
    """Where they were in the file, if they were checked there."""


def read_booster(data: bytearray, trees: ubjson.Packer = packed_trees) -> BoosterFile:
    """Raises one of `READ_ERRORS` for what is no model. The data may become the content: nobody else may keep it."""
    if data[:1] != b"{":
        raise ValueError("it does not begin as JSON or UBJSON does")
    # UBJSON begins with the length of the first name, JSON with the name or a space.
    if data[1:2] != b"L":
        return _checked(_json(data), data)
    try:
        return _checked(ubjson.decode(data, {"trees": trees}), data)
    except _OtherColumns:
        return _checked(ubjson.decode(data), data)


def facts_of(file: BoosterFile) -> tuple[dict[str, Any], bytearray]:
    """What `recall_booster` needs of a file besides its data: where the trees are, or else all that it has."""
    if file.trees is not None:
        return {"trees": asdict(file.trees)}, bytearray()
    return {name: getattr(file, name) for name in _FACTS}, file.content


def recall_booster(data: bytearray, facts: Mapping[str, Any], content: memoryview) -> BoosterFile:
    """As `read_booster`, of data that it has read before."""
    if "trees" not in facts:
        names = tuple(facts["column_names"])
        return BoosterFile(
            **{**{name: facts[name] for name in _FACTS}, "column_names": names}, content=bytearray(content), trees=None
        )
    known = PackedTrees(**facts["trees"])

    def where_they_were(data: bytearray, position: int, count: int) -> tuple[PackedTrees, int] | None:
        fits = (position, count) == (known.begin, known.count) and position < known.end <= len(data)
        return (known, known.end) if fits else None

    # What is around the trees is little, and checked as ever.
    read = read_booster(data, where_they_were)
    if read.trees != known:
        raise ValueError("the trees are not where they were")
    return read


class _OtherColumns(Exception):
    """The trees were checked for another number of columns than the model has."""


def _checked(document: Any, data: bytearray) -> BoosterFile:
    if not isinstance(document, dict):
        raise TypeError("it is no object")
    learner = document["learner"]
    parameters = learner["learner_model_param"]
    columns = _number(parameters["num_feature"], 1, MOST_COLUMNS)
    classes = _number(parameters.get("num_class", "0"), 0, MOST_GROUPS)
    targets = _number(parameters.get("num_target", "1"), 1, MOST_GROUPS)
    groups = max(classes, targets)
    if classes > 1 and targets > 1:
        raise ValueError("it has several classes and several targets")
    booster, rounds = _booster(learner["gradient_booster"], columns, groups)
    objective = _objective(learner["objective"], classes)
    checked = {
        "learner": {
            "attributes": {},
            "feature_names": [],
            "feature_types": [],
            "gradient_booster": booster,
            "learner_model_param": {
                "base_score": _base_score(parameters["base_score"], groups),
                "boost_from_average": "1",
                "num_class": str(classes),
                "num_feature": str(columns),
                "num_target": str(targets),
            },
            "objective": objective,
        },
        "version": whole_numbers(document["version"], 3, 0, 1 << 20).tolist(),
    }
    kept = _kept(booster)
    best = learner.get("attributes", {}).get("best_iteration")
    return BoosterFile(
        booster=booster["name"],
        objective=objective["name"],
        columns=columns,
        column_names=_names(learner.get("feature_names", ()), columns),
        groups=groups,
        targets=targets,
        best_iteration=None if best is None or not rounds else _number(best, 0, rounds - 1),
        rounds=rounds,
        content=ubjson.encode(checked) if kept is None else ubjson.encode_around(data, kept, checked),
        trees=None if kept is None else PackedTrees(kept.begin, kept.end, kept.count, columns),
    )


def _json(data: bytearray) -> Any:
    return json.loads(data, object_pairs_hook=_members)


def _members(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name is there twice")
    return members


def _booster(given: Mapping[str, Any], columns: int, groups: int) -> tuple[dict[str, Any], int]:
    name = given["name"]
    if name == "gblinear":
        weights = _floats(given["model"]["weights"], (columns + 1) * groups)
        return {"model": {"boosted_rounds": 0, "weights": weights}, "name": name}, 0
    if name == "gbtree":
        model, rounds = _forest(given["model"], columns, groups)
        return {"model": model, "name": name}, rounds
    if name == "dart":
        model, rounds = _forest(given["gbtree"]["model"], columns, groups)
        weights = _floats(given["weight_drop"], len(model["tree_info"])).tolist()
        return {"gbtree": {"model": model, "name": "gbtree"}, "name": name, "weight_drop": weights}, rounds
    raise ValueError("its booster is none of gbtree, dart and gblinear")


def _forest(given: Mapping[str, Any], columns: int, groups: int) -> tuple[dict[str, Any], int]:
    parallel = _number(given["gbtree_model_param"].get("num_parallel_tree", "1"), 1, 1 << 20)
    count = _number(given["gbtree_model_param"]["num_trees"], 0, 1 << 30)
    trees = _trees(given["trees"], columns, groups)
    held = trees.count if isinstance(trees, ubjson.Kept) else len(trees)
    if held != count:
        raise ValueError(f"it says that it has {count} trees, and has {held}")
    model: dict[str, Any] = {
        "gbtree_model_param": {"num_parallel_tree": str(parallel), "num_trees": str(count)},
        "tree_info": whole_numbers(given["tree_info"], count, 0, groups - 1).tolist(),
    }
    # Written since XGBoost 2.0; before, each round had as many trees for each group.
    rounds = count // (parallel * groups)
    if "iteration_indptr" in given:
        steps = whole_numbers(given["iteration_indptr"], None, 0, count)
        if not steps.size or steps[0] != 0 or steps[-1] != count or (np.diff(steps) < 0).any():
            raise ValueError("its rounds do not have all of its trees")
        model["iteration_indptr"], rounds = steps.tolist(), steps.size - 1
    # Last, as in the file: what comes after them takes no more room than it did, and 100 MB need not move for it.
    model["trees"] = trees
    return model, rounds


def _kept(booster: Mapping[str, Any]) -> ubjson.Kept | None:
    model = booster["gbtree"]["model"] if booster["name"] == "dart" else booster["model"]
    trees = model.get("trees")
    return trees if isinstance(trees, ubjson.Kept) else None


def _trees(given: Any, columns: int, groups: int) -> list[dict[str, Any]] | ubjson.Kept:
    if not isinstance(given, PackedTrees):
        return [_tree(tree, index, columns, groups) for index, tree in enumerate(given)]
    if given.columns != columns:
        raise _OtherColumns
    return ubjson.Kept(given.begin, given.end, given.count)


def _tree(given: Mapping[str, Any], index: int, columns: int, groups: int) -> dict[str, Any]:
    parameters = given["tree_param"]
    nodes = _number(parameters["num_nodes"], 1, MOST_NODES)
    width = max(1, _number(parameters.get("size_leaf_vector", "1"), 0, MOST_GROUPS))
    if width not in (1, groups):
        raise ValueError("a leaf has another number of values than the model")
    left = whole_numbers(given["left_children"], nodes, -1, nodes - 1)
    right = whole_numbers(given["right_children"], nodes, -1, nodes - 1)
    features = whole_numbers(given["split_indices"], nodes, 0, NOWHERE)
    kinds = whole_numbers(given.get("split_type", np.zeros(nodes, np.int64)), nodes, 0, 1)
    splits = left >= 0
    check_tree(left[splits], right[splits], features[splits], nodes, columns)
    parents = np.full(nodes, NOWHERE if width == 1 else -1, np.int32)
    parents[left[splits]] = parents[right[splits]] = np.flatnonzero(splits)
    # Nodes that were pruned stay in the file without a parent; XGBoost knows them by the column they split by.
    pruned = parents == parents[0]
    pruned[0] = False
    parents[pruned] = 0
    features = np.where(splits, features, np.where(pruned, NOWHERE, 0))
    tree: dict[str, Any] = {
        "base_weights": _floats(given["base_weights"], nodes * width),
        "default_left": whole_numbers(_bits(given["default_left"]), nodes, 0, 1).astype(np.uint8),
        "id": index,
        "left_children": left.astype(np.int32),
        "right_children": right.astype(np.int32),
        "parents": parents,
        "split_indices": features.astype(np.int32),
        "split_type": kinds.astype(np.uint8),
        "tree_param": {
            "num_deleted": str(int(pruned.sum())),
            "num_feature": str(columns),
            "num_nodes": str(nodes),
            "size_leaf_vector": str(width),
        },
        **{name: _floats(given[name], nodes) for name in _PER_NODE},
        **_categories(given, np.flatnonzero(kinds == 1)),
    }
    if "leaf_weights" in given:
        weights = _floats(given["leaf_weights"], None)
        # The leaves of a tree with several values for each say where theirs are in place of a right child.
        if width > 1 and (right[~splits].min() < 0 or (right[~splits].max() + 1) * width > weights.size):
            raise ValueError("a leaf has no values")
        tree["leaf_weights"] = weights
    elif width > 1:
        raise ValueError("its leaves have several values each in a form of before XGBoost 3.1; save it again with that")
    return tree


def _categories(given: Mapping[str, Any], nodes: Array) -> dict[str, Any]:
    if "categories" not in given and not nodes.size:
        empty = np.empty(0, np.int64)
        given = dict.fromkeys(("categories", "categories_nodes", "categories_segments", "categories_sizes"), empty)
    categories = whole_numbers(given["categories"], None, 0, _MOST_CATEGORIES)
    segments = whole_numbers(given["categories_segments"], nodes.size, 0, categories.size)
    sizes = whole_numbers(given["categories_sizes"], nodes.size, 0, categories.size)
    named = whole_numbers(given["categories_nodes"], nodes.size, 0, NOWHERE)
    if not np.array_equal(named, nodes) or (segments + sizes > categories.size).any():
        raise ValueError("the categories of a node are not there")
    return {
        "categories": categories.astype(np.int32),
        "categories_nodes": named.astype(np.int32),
        "categories_segments": segments,
        "categories_sizes": sizes,
    }


def _objective(given: Mapping[str, Any], classes: int) -> dict[str, Any]:
    objective = {name: _plain(value) for name, value in given.items()}
    if not isinstance(objective["name"], str):
        raise TypeError("its objective has no name")
    if objective["name"].startswith("multi:"):
        if _number(given["softmax_multiclass_param"]["num_class"], 2, MOST_GROUPS) != classes:
            raise ValueError("its objective has another number of classes than the model")
        # The probabilities tell the class as well, which is all that softmax would.
        objective["name"] = "multi:softprob"
    return objective


def _plain(value: Any) -> Any:
    """An objective's settings: text, or an object of texts. XGBoost checks what they say."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and all(isinstance(item, str) for item in value.values()):
        return dict(value)
    raise TypeError("its objective has settings that are no text")


def _base_score(text: Any, groups: int) -> str:
    values = [float(part) for part in str(text).strip("[]").split(",")]
    if len(values) not in (1, groups):
        raise ValueError("it has another number of base scores than of groups")
    return str(text)


def _names(given: Any, columns: int) -> tuple[str, ...]:
    names = tuple(str(name) for name in given)
    if len(names) not in (0, columns) or len(set(names)) != len(names):
        raise ValueError("it has other names than columns")
    return names


def _floats(values: Any, count: int | None) -> Array:
    with np.errstate(over="ignore"):
        array = np.asarray(values, np.float32)
    if array.ndim != 1 or (count is not None and array.size != count):
        raise ValueError("a list of numbers has another length than it must")
    return array


def _bits(values: Any) -> Any:
    return [int(value) for value in values] if isinstance(values, list) else values


def _number(text: Any, low: int, high: int) -> int:
    number = int(text) if isinstance(text, str) and len(text) < 20 else None
    if number is None or not low <= number <= high:
        raise ValueError(f"a number is not between {low} and {high}")
    return number


_FACTS = tuple(field.name for field in fields(BoosterFile) if field.name not in ("content", "trees"))

READ_ERRORS: tuple[type[Exception], ...] = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""What `read_booster` raises for a damaged file."""
