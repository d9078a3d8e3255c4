# SPDX-License-Identifier: Apache-2.0
"""Code that XGBoost and LightGBM share: the backend and outputs of a tree ensemble, and checks of tree indices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal

import numpy as np

from headrace.backends.contract import Array, EngineServices, ModelFiles, Placement
from headrace.backends.model_config import model_path, parse_bool
from headrace.backends.signature import Port, Signature, check_signature, completion, is_declared
from headrace.backends.tabular.check_cache import Format, Read, read_checked
from headrace.backends.tabular.columns import Columns, output_sources, with_declared_dtype
from headrace.core.dtypes import FP32, FP64, INT32, INT64, DType
from headrace.core.errors import Internal, InvalidArgument
from headrace.models.config.types import ModelConfig


def check_tree(left: Array, right: Array, features: Array, nodes: int, columns: int) -> None:
    """Raise `ValueError` unless the nodes form a tree with root 0. The arrays hold the nodes that split."""
    children = np.concatenate([left, right]).astype(np.int64)
    if children.size and (children.min() < 1 or children.max() >= nodes):
        raise ValueError("a node's child is not in the tree")
    # Every node has one parent and the root has none, so there is no cycle.
    if children.size and np.bincount(children).max() > 1:
        raise ValueError("two nodes have the same child")
    if features.size and (features.min() < 0 or features.max() >= columns):
        raise ValueError("a node splits by a column that the model does not have")


def int64_array(values: Any, count: int | None, low: int, high: int) -> Array:
    """Return a list or array of integers as int64; it must have this length and lie in this range."""
    array = values if isinstance(values, np.ndarray) else np.array(values, dtype=None if values else np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (count is not None and array.size != count):
        raise ValueError("a list of integers has a wrong type or length")
    if array.size and (array.min() < low or array.max() > high):
        raise ValueError(f"a number is not between {low} and {high}")
    return array.astype(np.int64)


FIL_OUTPUT = "output__0"
MAX_THREADS = 1024

Kind = Literal["value", "binary", "multiclass"]
Score = Callable[[Array, bool], Array]
"""Predict the rows of a table: what the objective defines, or, if the argument is True, the raw sums of the trees."""

_FLOATS = (FP32, FP64)
_CLASSES = (INT64, INT32, FP32, FP64)

log = logging.getLogger("headrace.backends")


@dataclass(frozen=True, slots=True)
class Forest:
    """The properties of a model that decide its outputs."""

    kind: Kind
    groups: int
    """Scores per row."""
    dtype: DType
    """Data type of the scores."""


class Outputs:
    """The outputs of one model."""

    def __init__(self, config: ModelConfig, forest: Forest) -> None:
        self._forest = forest
        self._threshold = _threshold(config)
        groups = forest.groups
        probabilities = 2 if forest.kind == "binary" and groups == 1 else groups
        value = forest.dtype
        if forest.kind == "value":
            usual = [with_declared_dtype(Port("predict", "value", value, (-1, groups)), config, _FLOATS)]
        else:
            targets = groups if forest.kind == "binary" else 1
            usual = [
                with_declared_dtype(Port("predict", "class", INT64, (-1, targets)), config, _CLASSES),
                with_declared_dtype(Port("predict_proba", "value", value, (-1, probabilities)), config, _FLOATS),
            ]
        rest = [
            with_declared_dtype(Port("raw_score", "value", value, (-1, groups)), config, _FLOATS),
            self._fil(config),
        ]
        # The FIL output comes before the raw scores: for one float of a binary classifier it is the probability.
        known = {port.name: port for port in (*usual, *rest[::-1])}
        declared = output_sources(config, known)
        self._sources = {**{name: name for name in known}, **declared}
        allowed = {name: _CLASSES if port.kind == "class" else _FLOATS for name, port in known.items()}
        every = dict(known)
        for name, source in declared.items():
            if name != source:
                port = known[source]
                every[name] = with_declared_dtype(
                    Port(name, port.kind, port.dtype, port.shape), config, allowed[source]
                )
        # `check_signature` reports an output for which nothing is left, with the list of known ones.
        self.ports = every
        self.usual = {name: every[name] for name in (declared or [port.name for port in usual])}

    def signature(self, columns: Columns, *, usual: bool = False) -> Signature:
        """Return the ports of the default outputs, or, for a check of the configuration, of all possible ones."""
        return Signature(columns.ports, self.usual if usual else self.ports, {})

    def compute(self, table: Array, requested: Collection[str], score: Score) -> dict[str, Array]:
        """Compute the requested outputs for these rows."""
        rows = table.shape[0]
        if not rows:
            # LightGBM rejects an empty table, and XGBoost returns another shape for it.
            return {name: np.empty(self._sized(name, 0), self._numpy(name)) for name in requested}
        shape = (rows, self._forest.groups)
        values: Array | None = None
        answers = {}
        for name in requested:
            source = self._sources[name]
            if source == "raw_score":
                answer = score(table, True).reshape(shape)
            else:
                values = score(table, False).reshape(shape) if values is None else values
                answer = self._answer(source, values)
            answers[name] = answer.astype(self._numpy(name), copy=False)
        return answers

    def _answer(self, name: str, values: Array) -> Array:
        requested = self._fil_source if name == FIL_OUTPUT else name
        if self._forest.kind == "value" or requested == "value":
            return values
        if requested == "predict":
            if self._forest.kind == "binary":
                chosen: Array = values > self._threshold
                return chosen
            best: Array = values.argmax(axis=1, keepdims=True)
            return best
        if self._sized(name, 0)[1] == self._forest.groups:
            return values
        return np.concatenate([1 - values, values], axis=1)

    def _fil(self, config: ModelConfig) -> Port:
        """FIL's single output. Its configurations declare one or two probabilities for a binary classifier."""
        kind, width = self._forest.kind, self._forest.groups
        parameters = config.parameters
        classes = parse_bool(parameters, "output_class", False) or parse_bool(parameters, "is_classifier", False)
        self._fil_source = "value"
        if kind != "value":
            if parse_bool(parameters, "predict_proba", False):
                self._fil_source = "predict_proba"
            elif classes or kind == "multiclass":
                self._fil_source = "predict"
        declared = next((spec.dims for spec in config.outputs if spec.name == FIL_OUTPUT), None)
        if self._fil_source == "predict" and kind == "multiclass":
            width = 1
        elif self._fil_source == "predict_proba" and kind == "binary" and width == 1 and declared and declared[-1] == 2:
            width = 2
        return Port(FIL_OUTPUT, "value", FP32, (-1, width))

    def _sized(self, name: str, rows: int) -> tuple[int, int]:
        shape = self.ports[name].shape or (-1, 1)
        return rows, shape[1]

    def _numpy(self, name: str) -> np.dtype[np.generic]:
        return (self.ports[name].dtype or FP32).numpy


class ForestBackend(Generic[Read]):
    """A backend on the CPU. A subclass says how to read, describe and open the files of its library."""

    library: str
    """The library's name, in errors."""
    filenames: tuple[str, ...]
    remedy: str
    """What to do about a file that cannot be read."""
    format: Format[Read]
    open_error: type[Exception]
    """The library's exception for a file that it cannot open."""

    def usable_gpus(self, present: int) -> int:
        """Return 0: LightGBM uses GPUs for training only, and XGBoost's copy to a GPU takes longer than a batch."""
        return 0

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """Return inputs, outputs and batch size from the file."""
        if is_declared(config):
            return None
        columns, outputs = self._describe(config, self._read(config, self._model_file(config, files)))
        return completion(config, outputs.signature(columns, usual=True))

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> ForestModel:
        """Read the file and check the configuration against it."""
        file = self._model_file(config, files)
        read = self._read(config, file)
        columns, outputs = self._describe(config, read)
        check_signature(config, outputs.signature(columns))
        try:
            new_score = self._open(config, read)
        except self.open_error:
            log.exception("model %s: %s could not be opened", config.name, file)
            raise self._unreadable(config, file, f"{self.library} {self.format.library}") from None
        return ForestModel(config, columns, outputs, new_score)

    def _model_file(self, config: ModelConfig, files: ModelFiles) -> Path:
        return model_path(config, files, *self.filenames)

    def _read(self, config: ModelConfig, file: Path) -> Read:
        try:
            return read_checked(config, file, self.format)
        except self.format.errors:
            log.exception("model %s: %s could not be read", config.name, file)
            raise self._unreadable(config, file, self.library) from None

    def _describe(self, config: ModelConfig, read: Read) -> tuple[Columns, Outputs]:
        raise NotImplementedError

    def _open(self, config: ModelConfig, read: Read) -> Callable[[], Score]:
        """Load the booster; return a function that creates the score function of an instance."""
        raise NotImplementedError

    def _unreadable(self, config: ModelConfig, file: Path, library: str) -> InvalidArgument:
        return InvalidArgument(
            f"model '{config.name}': {library} cannot read '{file.name}'. It is damaged or not a model that {library} "
            f"saved; the server's log says where. {self.remedy}"
        )


class ForestModel:
    """One version: a booster that instances may share."""

    def __init__(self, config: ModelConfig, columns: Columns, outputs: Outputs, new_score: Callable[[], Score]) -> None:
        self._config = config
        self._columns = columns
        self._outputs = outputs
        self._new_score: Callable[[], Score] | None = new_score

    def open(self, placement: Placement) -> ForestInstance:
        """Create an instance."""
        if self._new_score is None:
            raise Internal(f"model '{self._config.name}' is closed")
        return ForestInstance(self._config, self._columns, self._outputs, self._new_score())

    def close(self) -> None:
        """Release the booster."""
        self._new_score = None


class ForestInstance:
    """Runs a booster."""

    def __init__(self, config: ModelConfig, columns: Columns, outputs: Outputs, score: Score) -> None:
        self._name = config.name
        self._columns = columns
        self._outputs = outputs
        self._score: Score | None = score

    def compute(self, inputs: Mapping[str, Array], requested: Collection[str]) -> Mapping[str, Array]:
        """Run a batch."""
        table = self._columns.table(inputs)
        if self._score is None:
            raise Internal(f"model '{self._name}' is closed")
        try:
            return self._outputs.compute(table, requested, self._score)
        except Exception:
            # Each library has one class for all of its errors. The shape was checked, so this is an internal error.
            log.exception("model %s could not compute a batch", self._name)
            raise Internal(
                f"model '{self._name}' failed to compute this request; the server's log has the details"
            ) from None

    def close(self) -> None:
        """Release the booster; it is freed with the last reference."""
        self._score = None


def _threshold(config: ModelConfig) -> float:
    text = config.parameters.get("threshold", "0.5")
    try:
        return float(text)
    except ValueError:
        raise InvalidArgument(f"parameter threshold is '{text[:32]}': use a number, such as 0.5") from None
