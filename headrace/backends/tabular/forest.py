# SPDX-License-Identifier: Apache-2.0
"""What XGBoost and LightGBM share: which outputs a model has, and how its numbers become them.

Called by the two backends. The outputs have the names of scikit-learn's methods and mean the same:

    predict         the class of a classifier, by its number (INT64 [1]); the value of other models (FP [targets])
    predict_proba   of a classifier, the probability of each class (FP [classes]; two for a binary one)
    raw_score       what the trees add up to, before the objective turns it into a value; given only where a
                    configuration asks for it
    output__0       the one output of Triton's FIL backend (FP32): what its parameters say

FP is FP32 for XGBoost and FP64 for LightGBM, as each computes.

    parameters
      intra_op_thread_count   threads for a batch; 1 unless told, 0 for all cores
      threshold               of a binary classifier: the probability over which the class is 1; 0.5 unless told
      output_class, is_classifier   FIL's: true lets output__0 be the class
      predict_proba           FIL's: true lets output__0 be the probabilities
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from headrace.backends.contract import Array
from headrace.backends.signature import Port, Signature
from headrace.backends.tabular.columns import Columns, switch_of, widened
from headrace.core.dtypes import FP32, FP64, INT32, INT64, DType
from headrace.core.errors import Internal, InvalidArgument
from headrace.models.config.types import ModelConfig

FIL_OUTPUT = "output__0"
MOST_THREADS = 1024

Kind = Literal["value", "binary", "multiclass"]
Score = Callable[[Array], Array]

_FLOATS = (FP32, FP64)
_CLASSES = (INT64, INT32, FP32, FP64)

log = logging.getLogger("headrace.backends")


@dataclass(frozen=True, slots=True)
class Forest:
    """What the outputs of a model depend on."""

    kind: Kind
    groups: int
    """Numbers that the library gives for each row."""
    dtype: DType
    """Of these numbers."""


class Outputs:
    """The outputs of one model."""

    def __init__(self, config: ModelConfig, forest: Forest) -> None:
        self._forest = forest
        self._threshold = _threshold(config)
        groups = forest.groups
        probabilities = 2 if forest.kind == "binary" and groups == 1 else groups
        value = forest.dtype
        if forest.kind == "value":
            usual = [widened(Port("predict", "value", value, (-1, groups)), config, _FLOATS)]
        else:
            targets = groups if forest.kind == "binary" else 1
            usual = [
                widened(Port("predict", "class", INT64, (-1, targets)), config, _CLASSES),
                widened(Port("predict_proba", "value", value, (-1, probabilities)), config, _FLOATS),
            ]
        rest = [widened(Port("raw_score", "value", value, (-1, groups)), config, _FLOATS), self._fil(config)]
        every = {port.name: port for port in (*usual, *rest)}
        declared = [spec.name for spec in config.outputs if spec.name in every]
        # A name that is not there is for `check_signature` to complain of, with all that are.
        self.ports = every
        self.usual = {name: every[name] for name in (declared or [port.name for port in usual])}

    def signature(self, columns: Columns, *, usual: bool = False) -> Signature:
        """For a configuration that says less, or, of all that can be asked for, to hold it against."""
        return Signature(columns.ports, self.usual if usual else self.ports, {})

    def compute(self, table: Array, wanted: Collection[str], value: Score, raw: Score) -> dict[str, Array]:
        """The wanted outputs of these rows."""
        rows = table.shape[0]
        if not rows:
            # LightGBM refuses an empty table, and XGBoost answers it in another shape.
            return {name: np.empty(self._sized(name, 0), self._numpy(name)) for name in wanted}
        shape = (rows, self._forest.groups)
        values: Array | None = None
        answers = {}
        for name in wanted:
            if name == "raw_score":
                answer = raw(table).reshape(shape)
            else:
                values = value(table).reshape(shape) if values is None else values
                answer = self._answer(name, values)
            answers[name] = answer.astype(self._numpy(name), copy=False)
        return answers

    def _answer(self, name: str, values: Array) -> Array:
        asked = self._fil_means if name == FIL_OUTPUT else name
        if self._forest.kind == "value" or asked == "value":
            return values
        if asked == "predict":
            if self._forest.kind == "binary":
                chosen: Array = values > self._threshold
                return chosen
            best: Array = values.argmax(axis=1, keepdims=True)
            return best
        if self._sized(name, 0)[1] == self._forest.groups:
            return values
        return np.concatenate([1 - values, values], axis=1)

    def _fil(self, config: ModelConfig) -> Port:
        """FIL's one output. Its configurations declare one probability or two for a binary classifier."""
        kind, width = self._forest.kind, self._forest.groups
        classes = switch_of(config.parameters, "output_class") or switch_of(config.parameters, "is_classifier")
        self._fil_means = "value"
        if kind != "value":
            if switch_of(config.parameters, "predict_proba"):
                self._fil_means = "predict_proba"
            elif classes or kind == "multiclass":
                self._fil_means = "predict"
        declared = next((spec.dims for spec in config.outputs if spec.name == FIL_OUTPUT), None)
        if self._fil_means == "predict" and kind == "multiclass":
            width = 1
        elif self._fil_means == "predict_proba" and kind == "binary" and width == 1 and declared and declared[-1] == 2:
            width = 2
        return Port(FIL_OUTPUT, "value", FP32, (-1, width))

    def _sized(self, name: str, rows: int) -> tuple[int, int]:
        shape = self.ports[name].shape or (-1, 1)
        return rows, shape[1]

    def _numpy(self, name: str) -> np.dtype[np.generic]:
        return (self.ports[name].dtype or FP32).numpy


class ForestInstance:
    """Computes with a booster that instances may share."""

    def __init__(self, config: ModelConfig, columns: Columns, outputs: Outputs, value: Score, raw: Score) -> None:
        self._name = config.name
        self._columns = columns
        self._outputs = outputs
        self._scores: tuple[Score, Score] | None = (value, raw)

    def compute(self, inputs: Mapping[str, Array], wanted: Collection[str]) -> Mapping[str, Array]:
        """Compute a batch."""
        table = self._columns.table(inputs)
        if self._scores is None:
            raise Internal(f"model '{self._name}' is closed")
        try:
            return self._outputs.compute(table, wanted, *self._scores)
        except Exception:
            # Each library has one class for all of its errors, and the shape was checked: the rest is ours.
            log.exception("model %s could not compute a batch", self._name)
            raise Internal(
                f"model '{self._name}' failed to compute this request; the server's log has the details"
            ) from None

    def close(self) -> None:
        """Let the booster go; the last of its instances and the model free it."""
        self._scores = None


def _threshold(config: ModelConfig) -> float:
    text = config.parameters.get("threshold", "0.5")
    try:
        return float(text)
    except ValueError:
        raise InvalidArgument(f"parameter threshold is '{text[:32]}': use a number, such as 0.5") from None


def unreadable(config: ModelConfig, filename: str, library: str, remedy: str) -> InvalidArgument:
    """The error for a file that is not what its name says."""
    return InvalidArgument(
        f"model '{config.name}': {library} cannot read '{filename}'. It is damaged or not a model that {library} saved; "
        f"the server's log says where. {remedy}"
    )
