# SPDX-License-Identifier: Apache-2.0
"""The LightGBM backend: models saved as `model.txt`, on the CPU.

Inputs are described in `columns`, outputs and most parameters in `forest`. The input is FP64, as LightGBM computes, or
FP32 if the configuration says so. A missing value is NaN; the value of a categorical column is the category's number.
Instances share one booster: predicting only reads it.

    parameters
      start_iteration_predict, num_iteration_predict   as in LightGBM: the first round to use, and how many (default: all)
      checked_file_cache   see `check_cache`

LightGBM has one thread count for the whole process: the last batch to start sets it. Models with different
`intra_op_thread_count` therefore affect each other's speed, but not their results.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightgbm as lgb

from headrace.backends.contract import Array, EngineServices, ModelFiles, Placement
from headrace.backends.model_config import model_path, number_of
from headrace.backends.signature import check_signature, completion, is_declared
from headrace.backends.tabular.check_cache import Format, read_checked
from headrace.backends.tabular.columns import Columns
from headrace.backends.tabular.forest import MAX_THREADS, Forest, ForestInstance, Outputs, unreadable
from headrace.backends.tabular.lightgbm_file import (
    CHECKS,
    READ_ERRORS,
    BoosterText,
    facts_of,
    read_booster,
    recall_booster,
)
from headrace.core.dtypes import FP32, FP64
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import ModelConfig

DEFAULT_FILENAME = "model.txt"

_SAVE_AGAIN = "Load it where it was made, and save it with booster.save_model('model.txt')"
_REFUSED = (".pkl", ".pickle", ".joblib", ".json")
_LARGEST = 9_999_999

log = logging.getLogger("headrace.backends")


class LightGBMBackend:
    """`backend: "lightgbm"`."""

    def usable_gpus(self, present: int) -> int:
        """Return 0: LightGBM uses GPUs for training only."""
        return 0

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """Return inputs, outputs and batch size from the file."""
        if is_declared(config):
            return None
        columns, outputs = _described(config, _read(config, _model_file(config, files)))
        return completion(config, outputs.signature(columns, usual=True))

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> LightGBMModel:
        """Read the file and check the configuration against it."""
        file = _model_file(config, files)
        read = _read(config, file)
        columns, outputs = _described(config, read)
        check_signature(config, outputs.signature(columns))
        return LightGBMModel(config, columns, outputs, _open(config, file, read))


class LightGBMModel:
    """One version: a booster."""

    def __init__(self, config: ModelConfig, columns: Columns, outputs: Outputs, booster: Any) -> None:
        self._config = config
        self._columns = columns
        self._outputs = outputs
        self._settings = _settings(config)
        self._booster = booster

    def open(self, placement: Placement) -> ForestInstance:
        """Create an instance of the shared booster."""
        scores = _Scores(self._booster, self._settings)
        return ForestInstance(self._config, self._columns, self._outputs, scores.value, scores.raw)

    def close(self) -> None:
        """Release the booster."""
        self._booster = None


class _Scores:
    def __init__(self, booster: Any, settings: dict[str, int]) -> None:
        self._booster = booster
        self._settings = settings

    def value(self, table: Array) -> Array:
        answer: Array = self._booster.predict(table, **self._settings)
        return answer

    def raw(self, table: Array) -> Array:
        answer: Array = self._booster.predict(table, raw_score=True, **self._settings)
        return answer


def _settings(config: ModelConfig) -> dict[str, int]:
    parameters = config.parameters
    return {
        "num_threads": number_of(parameters, "intra_op_thread_count", 1, MAX_THREADS),
        "start_iteration": number_of(parameters, "start_iteration_predict", 0, _LARGEST),
        "num_iteration": number_of(parameters, "num_iteration_predict", 0, _LARGEST) or -1,
    }


def _model_file(config: ModelConfig, files: ModelFiles) -> Path:
    file = model_path(config, files, DEFAULT_FILENAME)
    if file.suffix in _REFUSED:
        raise InvalidArgument(
            f"model '{config.name}': '{file.name}' is not LightGBM's text format. Pickles are not read, because they may "
            f"run code. {_SAVE_AGAIN}"
        )
    return file


def _read(config: ModelConfig, file: Path) -> BoosterText:
    try:
        return read_checked(config, file, _format())
    except READ_ERRORS:
        log.exception("model %s: %s could not be read", config.name, file)
        raise unreadable(config, file.name, "LightGBM", _SAVE_AGAIN) from None


def _format() -> Format[BoosterText]:
    return Format("lightgbm", CHECKS, lgb.__version__, read_booster, facts_of, recall_booster, READ_ERRORS)


def _open(config: ModelConfig, file: Path, read: BoosterText) -> Any:
    try:
        return lgb.Booster(model_str=str(read.content, "utf-8"))
    except lgb.basic.LightGBMError:
        log.exception("model %s: %s could not be opened", config.name, file)
        raise unreadable(config, file.name, f"LightGBM {lgb.__version__}", _SAVE_AGAIN) from None


def _described(config: ModelConfig, read: BoosterText) -> tuple[Columns, Outputs]:
    columns = Columns(config, read.columns, read.column_names, [FP64, FP32])
    if read.classes > 1:
        forest = Forest("multiclass", read.classes, FP64)
    else:
        forest = Forest("binary" if read.objective == "binary" else "value", 1, FP64)
    return columns, Outputs(config, forest)
