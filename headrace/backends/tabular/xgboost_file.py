# SPDX-License-Identifier: Apache-2.0
"""A reader of XGBoost's JSON and UBJSON formats that checks every index."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from headrace.backends.contract import Array
from headrace.backends.tabular import ubjson
from headrace.backends.tabular.forest import check_tree, int64_array

NOWHERE = 2**31 - 1
_NODES_PER_STEP = 1 << 16
"""Nodes per step: their arrays stay in the CPU cache."""

_COUNT = struct.Struct(">q")


@dataclass(frozen=True, slots=True)
class PackedTrees:
    """The position of the checked trees in a file."""

    begin: int
    end: int
    count: int
    columns: int
    """The number of columns that they were checked for."""


def packed_trees(data: bytearray, position: int, count: int) -> tuple[PackedTrees, int] | None:
    """Check the trees that begin at `position`; return them and their end."""
    # Release all views before it returns: a bytearray with a view cannot be resized.
    with memoryview(data) as view:
        walk = _Walk(data, view, position)
        if count < 1 or not all(map(walk.step, range(count))) or not walk.check():
            return None
        return PackedTrees(position, walk.position, count, walk.columns), walk.position


class _Walk:
    """Steps from tree to tree by their sizes, and checks the trees it has passed."""

    def __init__(self, data: bytearray, view: memoryview, position: int) -> None:
        self._data = data
        self._view = view
        self.position = position
        self.columns = 0
        self._layouts: dict[int, _Layout] = {}
        self._passed = _Passed()

    def step(self, index: int) -> bool:
        """Step over a tree; return False if its layout is not the expected one."""
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
        array_bytes = 4 * nodes
        left, parents, right, features = layout.array_positions
        passed = self._passed
        passed.nodes += nodes
        passed.sizes.append(nodes)
        passed.deleted.append(deleted)
        passed.defaults.append(view[default : default + nodes])
        passed.left.append(view[after + left : after + left + array_bytes])
        passed.right.append(view[after + right : after + right + array_bytes])
        passed.parents.append(view[after + parents : after + parents + array_bytes])
        passed.features.append(view[after + features : after + features + array_bytes])
        return passed.nodes < _NODES_PER_STEP or self.check()

    def check(self) -> bool:
        """Check the trees passed since the last call."""
        passed, self._passed = self._passed, _Passed()
        return passed.are_trees(self.columns)

    def _layout(self, place: int) -> _Layout | None:
        if place + len(_FIRST) + 8 > len(self._data):
            return None
        (nodes,) = _COUNT.unpack_from(self._data, place + len(_FIRST))
        layout = self._layouts.get(nodes)
        # A tree has at least 37 bytes per node.
        if layout is None and 1 <= nodes <= (len(self._data) - place) // 37:
            layout = self._layouts[nodes] = _Layout(nodes)
        return layout

    def _parameters(self, place: int, layout: _Layout) -> tuple[int, int]:
        """Return the end of the tree and its number of deleted nodes; 0 and 0 if these are not its parameters."""
        data, begin, numbers = self._data, place, []
        for name in _PARAMETERS:
            if not data.startswith(name, place) or place + len(name) >= len(data):
                return 0, 0
            # The length has eight bytes; the last one is enough for this number.
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
    """A group of consecutive trees, as arrays of the links between nodes."""

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
            # Negative numbers, read as unsigned, exceed every size.
            if (side == 0).any() or (side.view(np.uint32) > last.view(np.uint32)).any():
                return False
            children.append(side + first)
        # Each child names its one parent, so no node has two parents and there is no cycle.
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
            and _are_pruned(~held, left, features, defaults)
            and bool((parents[~held].view(np.uint32) < np.repeat(sizes, sizes)[~held]).all())
            and np.array_equal(np.add.reduceat((~held).astype(np.int64), roots), deleted)
        )


def _are_pruned(nodes: Array, left: Array, features: Array, defaults: Array) -> bool:
    """Return whether these nodes are marked as XGBoost marks pruned nodes."""
    return bool((left[nodes] == -1).all() and (features[nodes] == NOWHERE).all() and (defaults[nodes] == 1).all())


def _numbers(parts: list[memoryview]) -> Array:
    joined = np.frombuffer(bytearray().join(parts), np.dtype(np.int32).newbyteorder("="))
    return joined.byteswap(inplace=True) if sys.byteorder == "little" else joined


def _name(text: str) -> bytes:
    return b"L" + _COUNT.pack(len(text)) + text.encode()


def _id(index: int) -> bytes:
    """Encode an integer as XGBoost does: in the fewest bytes that fit."""
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
    """The byte layout of a tree with this many nodes: the fixed bytes, and the positions of them and of the arrays."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.parameters = b""
        """Set after the first tree without deleted nodes."""
        count = _COUNT.pack(nodes)
        first = _FIRST + count
        empty = b"".join(_name(name) + b"[$" + kind + b"#L" + bytes(8) for name, kind in _EMPTY)
        second = empty + _name("default_left") + b"[$U#L" + count
        self.default_at = len(first) + 4 * nodes + len(second)
        self.id_at = self.default_at + nodes
        self.before_id = ((first, 0), (second, len(first) + 4 * nodes))
        after: list[tuple[bytes, int]] = []
        self.array_positions: list[int] = []
        place = 0
        for array, kind in _ARRAYS:
            piece = _name(array) + b"[$" + kind + b"#L" + count
            after.append((piece, place))
            place += len(piece)
            if kind == b"l":
                self.array_positions.append(place)
            place += 4 * nodes
        # Compared as a whole: trees with categorical splits take the slow path.
        last = _name("split_type") + b"[$U#L" + count + bytes(nodes) + _name("sum_hessian") + b"[$d#L" + count
        after.append((last, place))
        self.after_id = tuple(after)
        self.parameters_at = place + len(last) + 4 * nodes


CHECKS = 1
"""Raise this with every change of what this module, `forest` or `ubjson` accepts."""

MAX_COLUMNS = 1 << 24
MAX_GROUPS = 1 << 16
MAX_NODES = 1 << 30
_MAX_CATEGORIES = 1 << 24
_PER_NODE = ("loss_changes", "split_conditions", "sum_hessian")


@dataclass(frozen=True, slots=True)
class BoosterFile:
    """The parsed and checked content of a file."""

    booster: str
    """gbtree, dart or gblinear."""
    objective: str
    columns: int
    column_names: tuple[str, ...]
    """Empty, or one name per column."""
    groups: int
    """Scores per row: classes or targets."""
    targets: int
    best_iteration: int | None
    """The best round of early stopping; XGBoost's own classes ignore later rounds too."""
    rounds: int
    content: bytearray
    """The checked data, as XGBoost reads it."""
    trees: PackedTrees | None
    """The position of the trees in the file, if they were checked there."""


def read_booster(data: bytearray, trees: ubjson.Packer = packed_trees) -> BoosterFile:
    """Parse and check a model; raise one of `READ_ERRORS` if it is invalid. It may keep `data`: the caller must not."""
    if data[:1] != b"{":
        raise ValueError("it does not begin as JSON or UBJSON does")
    # UBJSON begins with the length of the first name, JSON with the name or a space.
    if data[1:2] != b"L":
        return _checked(_json(data), data)
    try:
        return _checked(ubjson.decode(data, {"trees": trees}), data)
    except _ColumnMismatch:
        return _checked(ubjson.decode(data), data)


def facts_of(file: BoosterFile) -> tuple[dict[str, Any], bytearray]:
    """Return what `recall_booster` needs besides the data: the position of the trees, or else everything."""
    if file.trees is not None:
        return {"trees": asdict(file.trees)}, bytearray()
    return {name: getattr(file, name) for name in _FACTS}, file.content


def recall_booster(data: bytearray, facts: Mapping[str, Any], content: memoryview) -> BoosterFile:
    """Return the result of `read_booster` for data that it has read before."""
    if "trees" not in facts:
        names = tuple(facts["column_names"])
        return BoosterFile(
            **{**{name: facts[name] for name in _FACTS}, "column_names": names}, content=bytearray(content), trees=None
        )
    known = PackedTrees(**facts["trees"])

    def position_facts(data: bytearray, position: int, count: int) -> tuple[PackedTrees, int] | None:
        fits = (position, count) == (known.begin, known.count) and position < known.end <= len(data)
        return (known, known.end) if fits else None

    # The data around the trees is small and is checked as usual.
    read = read_booster(data, position_facts)
    if read.trees != known:
        raise ValueError("the trees have moved")
    return read


class _ColumnMismatch(Exception):
    """Raised when the trees were checked for another number of columns than the model has."""


def _checked(document: Any, data: bytearray) -> BoosterFile:
    if not isinstance(document, dict):
        raise TypeError("it is not an object")
    learner = document["learner"]
    parameters = learner["learner_model_param"]
    columns = _number(parameters["num_feature"], 1, MAX_COLUMNS)
    classes = _number(parameters.get("num_class", "0"), 0, MAX_GROUPS)
    targets = _number(parameters.get("num_target", "1"), 1, MAX_GROUPS)
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
        "version": int64_array(document["version"], 3, 0, 1 << 20).tolist(),
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
    held = trees.count if isinstance(trees, ubjson.EncodedList) else len(trees)
    if held != count:
        raise ValueError(f"it declares {count} trees and has {held}")
    model: dict[str, Any] = {
        "gbtree_model_param": {"num_parallel_tree": str(parallel), "num_trees": str(count)},
        "tree_info": int64_array(given["tree_info"], count, 0, groups - 1).tolist(),
    }
    # Written since XGBoost 2.0; before that, each round had the same number of trees per group.
    rounds = count // (parallel * groups)
    if "iteration_indptr" in given:
        steps = int64_array(given["iteration_indptr"], None, 0, count)
        if not steps.size or steps[0] != 0 or steps[-1] != count or (np.diff(steps) < 0).any():
            raise ValueError("its rounds do not have all of its trees")
        model["iteration_indptr"], rounds = steps.tolist(), steps.size - 1
    # Last, as in the file: the data behind them does not grow, so 100 MB need not move.
    model["trees"] = trees
    return model, rounds


def _kept(booster: Mapping[str, Any]) -> ubjson.EncodedList | None:
    model = booster["gbtree"]["model"] if booster["name"] == "dart" else booster["model"]
    trees = model.get("trees")
    return trees if isinstance(trees, ubjson.EncodedList) else None


def _trees(given: Any, columns: int, groups: int) -> list[dict[str, Any]] | ubjson.EncodedList:
    if not isinstance(given, PackedTrees):
        return [_tree(tree, index, columns, groups) for index, tree in enumerate(given)]
    if given.columns != columns:
        raise _ColumnMismatch
    return ubjson.EncodedList(given.begin, given.end, given.count)


def _tree(given: Mapping[str, Any], index: int, columns: int, groups: int) -> dict[str, Any]:
    parameters = given["tree_param"]
    nodes = _number(parameters["num_nodes"], 1, MAX_NODES)
    width = max(1, _number(parameters.get("size_leaf_vector", "1"), 0, MAX_GROUPS))
    if width not in (1, groups):
        raise ValueError("a leaf and the model differ in the number of values")
    left = int64_array(given["left_children"], nodes, -1, nodes - 1)
    right = int64_array(given["right_children"], nodes, -1, nodes - 1)
    features = int64_array(given["split_indices"], nodes, 0, NOWHERE)
    kinds = int64_array(given.get("split_type", np.zeros(nodes, np.int64)), nodes, 0, 1)
    splits = left >= 0
    check_tree(left[splits], right[splits], features[splits], nodes, columns)
    parents = np.full(nodes, NOWHERE if width == 1 else -1, np.int32)
    parents[left[splits]] = parents[right[splits]] = np.flatnonzero(splits)
    # Pruned nodes stay in the file without a parent; XGBoost marks them by their split column.
    pruned = parents == parents[0]
    pruned[0] = False
    parents[pruned] = 0
    features = np.where(splits, features, np.where(pruned, NOWHERE, 0))
    tree: dict[str, Any] = {
        "base_weights": _floats(given["base_weights"], nodes * width),
        "default_left": int64_array(_bits(given["default_left"]), nodes, 0, 1).astype(np.uint8),
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
        # A leaf with several values stores their position in place of its right child.
        if width > 1 and (right[~splits].min() < 0 or (right[~splits].max() + 1) * width > weights.size):
            raise ValueError("a leaf has no values")
        tree["leaf_weights"] = weights
    elif width > 1:
        raise ValueError("its leaves have several values in the format before XGBoost 3.1; save it with 3.1 or newer")
    return tree


def _categories(given: Mapping[str, Any], nodes: Array) -> dict[str, Any]:
    if "categories" not in given and not nodes.size:
        empty = np.empty(0, np.int64)
        given = dict.fromkeys(("categories", "categories_nodes", "categories_segments", "categories_sizes"), empty)
    categories = int64_array(given["categories"], None, 0, _MAX_CATEGORIES)
    segments = int64_array(given["categories_segments"], nodes.size, 0, categories.size)
    sizes = int64_array(given["categories_sizes"], nodes.size, 0, categories.size)
    named = int64_array(given["categories_nodes"], nodes.size, 0, NOWHERE)
    if not np.array_equal(named, nodes) or (segments + sizes > categories.size).any():
        raise ValueError("the categories of a node are missing")
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
        if _number(given["softmax_multiclass_param"]["num_class"], 2, MAX_GROUPS) != classes:
            raise ValueError("its objective and the model differ in the number of classes")
        # softprob contains the class as well, which is all that softmax returns.
        objective["name"] = "multi:softprob"
    return objective


def _plain(value: Any) -> Any:
    """Return an objective's settings: a string or an object of strings. XGBoost checks their values."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and all(isinstance(item, str) for item in value.values()):
        return dict(value)
    raise TypeError("its objective has settings that are not strings")


def _base_score(text: Any, groups: int) -> str:
    values = [float(part) for part in str(text).strip("[]").split(",")]
    if len(values) not in (1, groups):
        raise ValueError("the number of base scores differs from the number of groups")
    return str(text)


def _names(given: Any, columns: int) -> tuple[str, ...]:
    names = tuple(str(name) for name in given)
    if len(names) not in (0, columns) or len(set(names)) != len(names):
        raise ValueError("the number of names differs from the number of columns")
    return names


def _floats(values: Any, count: int | None) -> Array:
    with np.errstate(over="ignore"):
        array = np.asarray(values, np.float32)
    if array.ndim != 1 or (count is not None and array.size != count):
        raise ValueError("a list of numbers has a wrong length")
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
"""Exceptions that `read_booster` raises for a damaged file."""
