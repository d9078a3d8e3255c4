# SPDX-License-Identifier: Apache-2.0
"""Opens models that skops saved, and no others. Called by `backends.tabular.sklearn`.

A skops file names the types to build, and skops refuses those it does not know to be harmless. On top of that:

- scikit-learn's trees are built too, which skops leaves to the caller, since scikit-learn follows a tree's indices without
  looking: here they are held against the tree's size before anything is computed (`trees`).
- A configuration may trust further types by the parameter `trusted_types`, but only classes of scikit-learn and of
  scipy.interpolate. A model's folder is data: a name of any other package would be a handle on any code that happens to
  be installed, and a function could be anything (`numpy.load` reads pickles).
- A text vectoriser that opens the files its input names would let callers read the server's disk; it is refused.
- An archive that unpacks to far more than it is, is refused before it is unpacked.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import skops.io
from sklearn.base import BaseEstimator
from sklearn.ensemble._hist_gradient_boosting.predictor import TreePredictor
from sklearn.tree._tree import Tree

from headrace.backends.tabular.trees import check_tree
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import ModelConfig

CHECKED_TYPES = tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in (Tree, TreePredictor))
TRUSTABLE = ("sklearn.", "scipy.interpolate.")

_SMALL = 1 << 30
_RATIO = 200


def open_skops(config: ModelConfig, file: Path) -> Any:
    """The model. Raises `InvalidArgument` for types that are not trusted; anything else for a file that is none."""
    _check_sizes(file)
    told = _trusted_by(config)
    unknown = sorted(set(skops.io.get_untrusted_types(file=file)) - {*CHECKED_TYPES, *told})
    if unknown:
        names = ", ".join(f"'{name[:128]}'" for name in unknown[:8])
        can = [name for name in unknown if name.startswith(TRUSTABLE)]
        raise InvalidArgument(
            f"model '{config.name}': '{file.name}' needs types that are not trusted: {names}. "
            + (
                f"If you made the file yourself, write parameters: trusted_types = '{','.join([*told, *can])}'"
                if len(can) == len(unknown)
                else "They are neither of scikit-learn nor of scipy.interpolate, and could run any code: save the model "
                "without them, or serve it with the python backend"
            )
        )
    model = skops.io.load(file, trusted=[*CHECKED_TYPES, *told])
    _check_parts(config, model)
    return model


def parts_of(model: Any) -> Iterator[Any]:
    """Every object inside a model, each once."""
    seen: set[int] = set()
    left = [model]
    while left:
        part = left.pop()
        if id(part) in seen or isinstance(part, (str, bytes, int, float, type(None))):
            continue
        seen.add(id(part))
        yield part
        if isinstance(part, Mapping):
            left.extend(part.values())
        elif isinstance(part, (list, tuple, set, frozenset)):
            left.extend(part)
        elif isinstance(part, np.ndarray):
            if part.dtype == object:
                left.extend(part.ravel())
        else:
            left.extend(getattr(part, "__dict__", {}).values())


def _check_sizes(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        unpacked = sum(member.file_size for member in archive.infolist())
    if unpacked > max(_SMALL, _RATIO * file.stat().st_size):
        raise ValueError(f"it unpacks to {unpacked} bytes")


def _trusted_by(config: ModelConfig) -> list[str]:
    names = [name.strip() for name in config.parameters.get("trusted_types", "").split(",") if name.strip()]
    for name in names:
        module, _, attribute = name.rpartition(".")
        kind = None
        if name.startswith(TRUSTABLE):
            try:
                kind = getattr(import_module(module), attribute, None)
            except ImportError:
                kind = None
        if not isinstance(kind, type):
            raise InvalidArgument(
                f"parameter trusted_types of model '{config.name}' names '{name[:128]}', which is no class of "
                "scikit-learn or scipy.interpolate: only these can be trusted"
            )
    return names


def _check_parts(config: ModelConfig, model: Any) -> None:
    parts = list(parts_of(model))
    checked: set[int] = set()
    for part in parts:
        if isinstance(part, BaseEstimator):
            for tree, columns in _trees_of(part):
                checked.add(id(tree))
                _check_tree(tree, columns)
        if getattr(part, "input", None) in ("file", "filename"):
            raise InvalidArgument(
                f"model '{config.name}' has a {type(part).__name__} that opens the files its input names: callers could "
                "read the server's disk. Save it with input='content'"
            )
    if any(isinstance(part, (Tree, TreePredictor)) and id(part) not in checked for part in parts):
        raise ValueError("a tree is where no model of scikit-learn has one")


def _trees_of(estimator: Any) -> Iterator[tuple[Any, int]]:
    """The trees that a model walks, with the number of columns it walks them with. A tree comes for each that does."""
    columns = getattr(estimator, "n_features_in_", 0)
    attributes = estimator.__dict__
    yield from ((part, columns) for part in parts_of(attributes.get("_predictors")) if isinstance(part, TreePredictor))
    if isinstance(attributes.get("tree_"), Tree):
        yield attributes["tree_"], columns
    members = list(np.asarray(attributes.get("estimators_", ()), dtype=object).ravel())
    # Some forests give each tree columns of its own choice.
    chosen = attributes.get("estimators_features_") or [range(columns)] * len(members)
    for member, own in zip(members, chosen, strict=False):
        tree = getattr(member, "__dict__", {}).get("tree_")
        if isinstance(tree, Tree):
            yield tree, len(own)


def _check_tree(tree: Any, columns: int) -> None:
    if isinstance(tree, Tree):
        left, right = tree.children_left, tree.children_right
        splits = left != -1
        check_tree(left[splits], right[splits], tree.feature[splits], tree.node_count, columns)
        return
    nodes = tree.nodes
    splits = nodes[nodes["is_leaf"] == 0]
    check_tree(splits["left"], splits["right"], splits["feature_idx"], nodes.size, columns)
    categorical = splits[splits["is_categorical"] == 1]
    sets = min(len(tree.binned_left_cat_bitsets), len(tree.raw_left_cat_bitsets))
    if categorical.size and categorical["bitset_idx"].max() >= sets:
        raise ValueError("a node splits by categories that are not there")
