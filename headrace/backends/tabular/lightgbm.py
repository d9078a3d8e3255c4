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

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightgbm as lgb

from headrace.backends.contract import Array, ModelFiles
from headrace.backends.model_config import parse_int
from headrace.backends.tabular.check_cache import Format
from headrace.backends.tabular.columns import Columns
from headrace.backends.tabular.forest import MAX_THREADS, Forest, ForestBackend, Outputs, Score
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

_REFUSED = (".pkl", ".pickle", ".joblib", ".json")
_LARGEST = 9_999_999


class LightGBMBackend(ForestBackend[BoosterText]):
    """`backend: "lightgbm"`."""

    library = "LightGBM"
    filenames = ("model.txt",)
    remedy = "Load it where it was made, and save it with booster.save_model('model.txt')"
    format = Format("lightgbm", CHECKS, lgb.__version__, read_booster, facts_of, recall_booster, READ_ERRORS)
    open_error = lgb.basic.LightGBMError

    def _model_file(self, config: ModelConfig, files: ModelFiles) -> Path:
        file = super()._model_file(config, files)
        if file.suffix in _REFUSED:
            raise InvalidArgument(
                f"model '{config.name}': '{file.name}' is not LightGBM's text format. Pickles are not read, because they "
                f"may run code. {self.remedy}"
            )
        return file

    def _describe(self, config: ModelConfig, read: BoosterText) -> tuple[Columns, Outputs]:
        columns = Columns(config, read.columns, read.column_names, [FP64, FP32])
        if read.classes > 1:
            forest = Forest("multiclass", read.classes, FP64)
        else:
            forest = Forest("binary" if read.objective == "binary" else "value", 1, FP64)
        return columns, Outputs(config, forest)

    def _open(self, config: ModelConfig, read: BoosterText) -> Callable[[], Score]:
        parameters = config.parameters
        settings = {
            "num_threads": parse_int(parameters, "intra_op_thread_count", 1, MAX_THREADS),
            "start_iteration": parse_int(parameters, "start_iteration_predict", 0, _LARGEST),
            "num_iteration": parse_int(parameters, "num_iteration_predict", 0, _LARGEST) or -1,
        }
        booster: Any = lgb.Booster(model_str=str(read.content, "utf-8"))

        def score(table: Array, raw: bool) -> Array:
            answer: Array = booster.predict(table, raw_score=raw, **settings)
            return answer

        return lambda: score
