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

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xgboost as xgb

from headrace.backends.contract import Array, ModelFiles
from headrace.backends.model_config import parse_int
from headrace.backends.tabular.check_cache import Format
from headrace.backends.tabular.columns import Columns
from headrace.backends.tabular.forest import MAX_THREADS, Forest, ForestBackend, Outputs, Score
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


class XGBoostBackend(ForestBackend[BoosterFile]):
    """`backend: "xgboost"`."""

    library = "XGBoost"
    filenames = ("model.ubj", "model.json", "xgboost.ubj", "xgboost.json")
    """Headrace's names, and those of Triton's FIL backend."""
    remedy = "Load it where it was made, and save it with booster.save_model('model.ubj')"
    format = Format("xgboost", CHECKS, xgb.__version__, read_booster, facts_of, recall_booster, READ_ERRORS)
    open_error = xgb.core.XGBoostError

    def _model_file(self, config: ModelConfig, files: ModelFiles) -> Path:
        file = super()._model_file(config, files)
        if file.suffix not in (".ubj", ".json"):
            raise InvalidArgument(
                f"model '{config.name}': '{file.name}' is neither .ubj nor .json. XGBoost's old binary format and pickles "
                f"are not read, because they may run code or crash. {self.remedy}"
            )
        return file

    def _describe(self, config: ModelConfig, read: BoosterFile) -> tuple[Columns, Outputs]:
        columns = Columns(config, read.columns, read.column_names, [FP32])
        if read.objective.startswith("multi:"):
            forest = Forest("multiclass", read.groups, FP32)
        else:
            forest = Forest("binary" if read.objective == "binary:logistic" else "value", read.groups, FP32)
        return columns, Outputs(config, forest)

    def _open(self, config: ModelConfig, read: BoosterFile) -> Callable[[], Score]:
        rounds = _rounds(config, read)
        booster = xgb.Booster({"nthread": parse_int(config.parameters, "intra_op_thread_count", 1, MAX_THREADS)})
        booster.load_model(read.content)
        if read.booster == "gblinear":
            # A linear model has no in-place prediction, and the other kind is not thread-safe; its copy is small.
            return lambda: partial(_linear_score, booster.copy())
        # The first prediction initialises the booster; later ones only read it. One round is enough for that.
        row = np.zeros((1, read.columns), np.float32)
        booster.inplace_predict(row, iteration_range=(0, min(read.rounds, 1)))
        return lambda: partial(_tree_score, booster, rounds)


def _linear_score(booster: Any, table: Array, raw: bool) -> Array:
    answer: Array = booster.predict(xgb.DMatrix(table, nthread=1), output_margin=raw)
    return answer


def _tree_score(booster: Any, rounds: tuple[int, int], table: Array, raw: bool) -> Array:
    # The number of columns was checked; column names are not kept.
    answer: Array = booster.inplace_predict(
        table,
        iteration_range=rounds,
        predict_type="margin" if raw else "value",
        missing=np.nan,
        validate_features=False,
    )
    return answer


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
