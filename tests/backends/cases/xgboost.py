# SPDX-License-Identifier: Apache-2.0
"""XGBoost's models: a classifier, a regressor in JSON, and a binary classifier as Triton's FIL backend configures it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import xgboost as xgb
from case import Arrays, Case

COLUMNS = 6


@cache
def booster(objective: str) -> Any:
    """A small booster, trained on noise."""
    random = np.random.default_rng(5)
    rows = random.standard_normal((300, COLUMNS)).astype(np.float32)
    rows[::7, 2] = np.nan
    kinds = np.clip(np.floor(np.abs(rows[:, 0]) * 2), 0, 3)
    labels = {"multi:softprob": kinds, "reg:squarederror": rows[:, 0] * 3, "binary:logistic": rows[:, 1] > 0}[objective]
    classes = {"num_class": 4} if objective.startswith("multi:") else {}
    settings = {"objective": objective, "nthread": 1, "max_depth": 3, "seed": 1, **classes}
    return xgb.train(settings, xgb.DMatrix(rows, label=labels, nthread=1), num_boost_round=5)


def _written(objective: str, filename: str, config: str) -> Any:
    def write(folder: Path) -> None:
        (folder / "1").mkdir()
        (folder / "config.pbtxt").write_text(config)
        booster(objective).save_model(folder / "1" / filename)

    return write


def _inputs(name: str) -> Any:
    def inputs(rows: int, seed: int) -> Arrays:
        values = np.random.default_rng(seed).standard_normal((rows, COLUMNS)).astype(np.float32)
        values[:1, 2] = np.nan
        return {name: values}

    return inputs


def _library(objective: str, given: Any) -> Any:
    return booster(objective).predict(xgb.DMatrix(given, nthread=1))


def classes_expected(given: Arrays) -> Arrays:
    proba = _library("multi:softprob", given["input"])
    return {"predict": proba.argmax(axis=1, keepdims=True), "predict_proba": proba}


def value_expected(given: Arrays) -> Arrays:
    return {"predict": _library("reg:squarederror", given["input"]).reshape(-1, 1)}


def fil_expected(given: Arrays) -> Arrays:
    proba = _library("binary:logistic", given["input__0"])
    return {"output__0": (proba > 0.3).astype(np.float32).reshape(-1, 1)}


_FIL = """backend: "xgboost"
max_batch_size: 32
input { name: "input__0" data_type: TYPE_FP32 dims: [ 6 ] }
output { name: "output__0" data_type: TYPE_FP32 dims: [ 1 ] }
parameters { key: "model_type" value { string_value: "xgboost_ubj" } }
parameters { key: "output_class" value { string_value: "true" } }
parameters { key: "threshold" value { string_value: "0.3" } }
dynamic_batching { }
"""
_PLAIN = 'backend: "xgboost"\nmax_batch_size: 32\ndynamic_batching { }\n'

CASES = [
    Case(
        "xgboost_classes",
        _written("multi:softprob", "model.ubj", _PLAIN),
        _inputs("input"),
        classes_expected,
        "model.ubj",
        needs_config=False,
    ),
    Case(
        "xgboost_value",
        _written("reg:squarederror", "model.json", _PLAIN),
        _inputs("input"),
        value_expected,
        "model.json",
        needs_config=False,
    ),
    Case("xgboost_fil", _written("binary:logistic", "model.ubj", _FIL), _inputs("input__0"), fil_expected, "model.ubj"),
]
