# SPDX-License-Identifier: Apache-2.0
"""LightGBM's models: a classifier, and a regressor with a column of categories."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import lightgbm as lgb
import numpy as np
from case import Arrays, Case

COLUMNS = 6


@cache
def booster(objective: str) -> Any:
    """A small booster, trained on noise."""
    rows = np.random.default_rng(6).standard_normal((400, COLUMNS))
    rows[:, 3] = np.floor(np.abs(rows[:, 3]) * 5)
    rows[::9, 2] = np.nan
    kinds = np.clip(np.floor(np.abs(rows[:, 0]) * 2), 0, 3)
    labels = {"multiclass": kinds, "regression": rows[:, 3] % 3, "binary": rows[:, 1] > 0}[objective]
    classes = {"num_class": 4} if objective == "multiclass" else {}
    settings = {"objective": objective, "num_threads": 1, "verbose": -1, "seed": 1, "min_data_in_leaf": 5, **classes}
    return lgb.train(settings, lgb.Dataset(rows, labels, categorical_feature=[3]), num_boost_round=5)


def _written(objective: str, config: str) -> Any:
    def write(folder: Path) -> None:
        (folder / "1").mkdir()
        (folder / "config.pbtxt").write_text(config)
        booster(objective).save_model(folder / "1" / "model.txt")

    return write


def inputs(rows: int, seed: int) -> Arrays:
    values = np.random.default_rng(seed).standard_normal((rows, COLUMNS))
    values[:, 3] = np.floor(np.abs(values[:, 3]) * 5)
    values[:1, 2] = np.nan
    return {"input": values}


def classes_expected(given: Arrays) -> Arrays:
    proba = booster("multiclass").predict(given["input"], num_threads=1)
    return {"predict": proba.argmax(axis=1, keepdims=True), "predict_proba": proba}


def value_expected(given: Arrays) -> Arrays:
    return {"predict": booster("regression").predict(given["input"], num_threads=1).reshape(-1, 1)}


_PLAIN = 'backend: "lightgbm"\nmax_batch_size: 32\ndynamic_batching { }\n'

CASES = [
    Case(
        "lightgbm_classes",
        _written("multiclass", _PLAIN),
        inputs,
        classes_expected,
        "model.txt",
        needs_config=False,
    ),
    Case("lightgbm_value", _written("regression", _PLAIN), inputs, value_expected, "model.txt", needs_config=False),
]
