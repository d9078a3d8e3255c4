# SPDX-License-Identifier: Apache-2.0
"""The XGBoost backend: models saved as `model.ubj` or `model.json`, on the CPU.

Inputs are described in `columns`, outputs and most parameters in `forest`. A missing value is NaN; the value of a
categorical column is the category's number. Instances share one booster: XGBoost's in-place prediction only reads it.

    parameters
      iteration_range   "begin,end": the rounds to use (default: all, or up to the best one after early stopping)
      checked_file_cache   see `check_cache`

Not supported: XGBoost's old binary format, which XGBoost itself no longer reads, and pickles.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import xgboost as xgb

from headrace.backends.contract import Array, EngineServices, ModelFiles, Placement
from headrace.backends.model_config import model_path, number_of
from headrace.backends.signature import check_signature, completion, is_declared
from headrace.backends.tabular.check_cache import Format, read_checked
from headrace.backends.tabular.columns import Columns
from headrace.backends.tabular.forest import MAX_THREADS, Forest, ForestInstance, Outputs, unreadable
from headrace.backends.tabular.xgboost_file import (
    CHECKS,
    READ_ERRORS,
    BoosterFile,
    facts_of,
    read_booster,
    recall_booster,
)
from headrace.core.dtypes import FP32
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import ModelConfig

FILENAMES = ("model.ubj", "model.json", "xgboost.ubj", "xgboost.json")
"""Headrace's names, and those of Triton's FIL backend."""

_SAVE_AGAIN = "Load it where it was made, and save it with booster.save_model('model.ubj')"

log = logging.getLogger("headrace.backends")


class XGBoostBackend:
    """`backend: "xgboost"`."""

    def usable_gpus(self, present: int) -> int:
        """Return 0: a batch runs faster on the CPU than its copy to a GPU takes."""
        return 0

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """Return inputs, outputs and batch size from the file."""
        if is_declared(config):
            return None
        columns, outputs = _described(config, _read(config, _model_file(config, files)))
        return completion(config, outputs.signature(columns, usual=True))

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> XGBoostModel:
        """Read the file and check the configuration against it."""
        file = _model_file(config, files)
        read = _read(config, file)
        columns, outputs = _described(config, read)
        check_signature(config, outputs.signature(columns))
        return XGBoostModel(config, columns, outputs, read, _open(config, file, read))


class XGBoostModel:
    """One version: a booster."""

    def __init__(
        self, config: ModelConfig, columns: Columns, outputs: Outputs, file: BoosterFile, booster: Any
    ) -> None:
        self._config = config
        self._columns = columns
        self._outputs = outputs
        self._rounds = _rounds(config, file)
        self._linear = file.booster == "gblinear"
        self._booster = booster

    def open(self, placement: Placement) -> ForestInstance:
        """Create an instance of the shared booster."""
        # A linear model has no in-place prediction, and the other kind is not thread-safe; its copy is small.
        booster = self._booster.copy() if self._linear else self._booster
        scores = _Scores(booster, self._rounds, linear=self._linear)
        return ForestInstance(self._config, self._columns, self._outputs, scores.value, scores.raw)

    def close(self) -> None:
        """Release the booster."""
        self._booster = None


class _Scores:
    def __init__(self, booster: Any, rounds: tuple[int, int], *, linear: bool) -> None:
        self._booster = booster
        self._rounds = rounds
        self._linear = linear

    def value(self, table: Array) -> Array:
        return self._predict(table, "value")

    def raw(self, table: Array) -> Array:
        return self._predict(table, "margin")

    def _predict(self, table: Array, kind: str) -> Array:
        answer: Array
        if self._linear:
            answer = self._booster.predict(xgb.DMatrix(table, nthread=1), output_margin=kind == "margin")
        else:
            # The number of columns was checked; column names are not kept.
            answer = self._booster.inplace_predict(
                table, iteration_range=self._rounds, predict_type=kind, missing=np.nan, validate_features=False
            )
        return answer


def _model_file(config: ModelConfig, files: ModelFiles) -> Path:
    file = model_path(config, files, *FILENAMES)
    if file.suffix not in (".ubj", ".json"):
        raise InvalidArgument(
            f"model '{config.name}': '{file.name}' is neither .ubj nor .json. XGBoost's old binary format and pickles are "
            f"not read, because they may run code or crash. {_SAVE_AGAIN}"
        )
    return file


def _read(config: ModelConfig, file: Path) -> BoosterFile:
    try:
        return read_checked(config, file, _format())
    except READ_ERRORS:
        log.exception("model %s: %s could not be read", config.name, file)
        raise unreadable(config, file.name, "XGBoost", _SAVE_AGAIN) from None


def _format() -> Format[BoosterFile]:
    return Format("xgboost", CHECKS, xgb.__version__, read_booster, facts_of, recall_booster, READ_ERRORS)


def _open(config: ModelConfig, file: Path, read: BoosterFile) -> Any:
    threads = number_of(config.parameters, "intra_op_thread_count", 1, MAX_THREADS)
    booster = xgb.Booster({"nthread": threads})
    try:
        booster.load_model(read.content)
        # The first prediction initialises the booster; later ones only read it. One round is enough for that.
        row = np.zeros((1, read.columns), np.float32)
        if read.booster != "gblinear":
            booster.inplace_predict(row, iteration_range=(0, min(read.rounds, 1)))
    except xgb.core.XGBoostError:
        log.exception("model %s: %s could not be opened", config.name, file)
        raise unreadable(config, file.name, f"XGBoost {xgb.__version__}", _SAVE_AGAIN) from None
    return booster


def _described(config: ModelConfig, file: BoosterFile) -> tuple[Columns, Outputs]:
    columns = Columns(config, file.columns, file.column_names, [FP32])
    if file.objective.startswith("multi:"):
        forest = Forest("multiclass", file.groups, FP32)
    else:
        forest = Forest("binary" if file.objective == "binary:logistic" else "value", file.groups, FP32)
    return columns, Outputs(config, forest)


def _rounds(config: ModelConfig, file: BoosterFile) -> tuple[int, int]:
    text = config.parameters.get("iteration_range")
    if text is None:
        return (0, 0) if file.best_iteration is None else (0, file.best_iteration + 1)
    begin, _, end = text.replace(" ", "").partition(",")
    numbers = [int(part) if part.isascii() and part.isdigit() and len(part) < 8 else -1 for part in (begin, end)]
    if file.booster == "gblinear" or not 0 <= numbers[0] < numbers[1] <= file.rounds:
        raise InvalidArgument(
            f"parameter iteration_range is '{text[:32]}': use 'begin,end', with end at most {file.rounds}"
        )
    return numbers[0], numbers[1]
