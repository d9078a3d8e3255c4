# SPDX-License-Identifier: Apache-2.0
"""scikit-learn's models: a forest with classes that are words, a pipeline, and columns of text and numbers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import skops.io
from case import Arrays, Case
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

COLUMNS = 4
_ROWS = np.random.default_rng(7).standard_normal((200, COLUMNS))
_WORDS = np.array(["low", "middle", "größt"])[np.clip(np.floor(np.abs(_ROWS[:, 0]) * 2), 0, 2).astype(int)]


@cache
def forest() -> Any:
    return RandomForestClassifier(n_estimators=5, max_depth=4, random_state=1, n_jobs=2).fit(_ROWS, _WORDS)


@cache
def pipeline() -> Any:
    return make_pipeline(StandardScaler(), Ridge()).fit(_ROWS, _ROWS[:, :2] * 3)


@cache
def table() -> Any:
    """A text column and two of numbers, by their places."""
    cells = np.empty((90, 3), dtype=object)
    cells[:, 0] = np.resize(["red", "green", "blue"], 90)
    cells[:, 1:] = _ROWS[:90, :2]
    columns = ColumnTransformer([("word", OneHotEncoder(handle_unknown="ignore"), [0])], remainder="passthrough")
    return make_pipeline(columns, LogisticRegression()).fit(cells, (_ROWS[:90, 0] > 0).astype(int))


def _written(model: Any, config: str) -> Any:
    def write(folder: Path) -> None:
        (folder / "1").mkdir()
        (folder / "config.pbtxt").write_text(config)
        skops.io.dump(model(), folder / "1" / "model.skops")

    return write


def inputs(rows: int, seed: int) -> Arrays:
    return {"input": np.random.default_rng(seed).standard_normal((rows, COLUMNS))}


def table_inputs(rows: int, seed: int) -> Arrays:
    random = np.random.default_rng(seed)
    words = np.empty((rows, 1), dtype=object)
    words[:, 0] = random.choice([b"red", b"green", b"blue", "weiß".encode()], rows)
    return {
        "colour": words,
        "width": random.standard_normal((rows, 1)),
        "height": random.standard_normal((rows, 1)).astype(np.float32),
    }


def forest_expected(given: Arrays) -> Arrays:
    words = np.array([word.encode() for word in forest().predict(given["input"])], dtype=object)
    return {"predict": words.reshape(-1, 1), "predict_proba": forest().predict_proba(given["input"])}


def pipeline_expected(given: Arrays) -> Arrays:
    return {"predict": pipeline().predict(given["input"])}


def table_expected(given: Arrays) -> Arrays:
    cells = np.empty((len(given["width"]), 3), dtype=object)
    cells[:, 0] = [word.decode() for word in given["colour"][:, 0]]
    cells[:, 1], cells[:, 2] = given["width"][:, 0], given["height"][:, 0]
    return {"predict": table().predict(cells).reshape(-1, 1), "predict_proba": table().predict_proba(cells)}


_PLAIN = 'backend: "sklearn"\nmax_batch_size: 32\ndynamic_batching { }\n'
_TABLE = """backend: "sklearn"
max_batch_size: 32
input [
  { name: "colour" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "width" data_type: TYPE_FP64 dims: [ 1 ] },
  { name: "height" data_type: TYPE_FP32 dims: [ 1 ] }
]
output [
  { name: "predict" data_type: TYPE_INT64 dims: [ 1 ] },
  { name: "predict_proba" data_type: TYPE_FP64 dims: [ 2 ] }
]
dynamic_batching { }
"""

CASES = [
    # Much of scikit-learn is Python, which holds the GIL.
    Case(
        "sklearn_forest",
        _written(forest, _PLAIN),
        inputs,
        forest_expected,
        "model.skops",
        needs_config=False,
        releases_gil=False,
    ),
    Case(
        "sklearn_pipeline",
        _written(pipeline, _PLAIN),
        inputs,
        pipeline_expected,
        "model.skops",
        needs_config=False,
        releases_gil=False,
    ),
    Case("sklearn_table", _written(table, _TABLE), table_inputs, table_expected, "model.skops", releases_gil=False),
]
