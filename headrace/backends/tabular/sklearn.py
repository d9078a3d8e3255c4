# SPDX-License-Identifier: Apache-2.0
"""Models of scikit-learn that skops saved as `model.skops`, on the CPU.

Called by the engine through `backends.contract`. Inputs are described in `columns`; a column may be text as well, and a
column of numbers has any type, FP64 unless told. What a file may hold is in `skops_file`. Outputs have the names of the
model's methods:

    predict             the class as it was trained with (INT64, BYTES, ...), the value, or the cluster: [1] or [targets]
    predict_proba, predict_log_proba, decision_function, transform, score_samples   as the method gives it

    parameters
      methods          the outputs, of a model without any in its configuration; "predict" and, where the model has it,
                       "predict_proba" unless told, or "transform" for a model that does not predict
      trusted_types    further types that the file may hold
      intra_op_thread_count   threads for a batch, where scikit-learn has n_jobs; 1 unless told, 0 for all cores. The threads
                       of numpy, and of the few models that use OpenMP, are set by OMP_NUM_THREADS for the process

What a method gives is found by a row of zeros, so for a model with columns of text a configuration must say it. Instances
share the model, since predicting leaves it as it is; what of it is Python runs one batch at a time.
Pickles and joblib's files are not read: they run code when they are opened. A model that was exported to ONNX is served by
`backend: "onnxruntime"`, with the same answers and less work.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator

from headrace.backends.contract import Array, EngineServices, ModelFiles, Placement
from headrace.backends.model_files import model_path
from headrace.backends.parameters import number_of
from headrace.backends.signature import Port, Signature, check_signature, completion, is_declared
from headrace.backends.tabular.columns import Columns, widened
from headrace.backends.tabular.skops_file import open_skops, parts_of
from headrace.core.dtypes import (
    BOOL,
    BYTES,
    FP32,
    FP64,
    INT8,
    INT16,
    INT32,
    INT64,
    UINT8,
    UINT16,
    UINT32,
    UINT64,
    dtype_of,
)
from headrace.core.errors import FailedPrecondition, HeadraceError, Internal, InvalidArgument
from headrace.models.config.types import ModelConfig

DEFAULT_FILENAME = "model.skops"
METHODS = ("predict", "predict_proba", "predict_log_proba", "decision_function", "transform", "score_samples")

_COLUMN_TYPES = (FP64, FP32, INT64, INT32, INT16, INT8, UINT64, UINT32, UINT16, UINT8, BOOL)
_PICKLES = (".pkl", ".pickle", ".joblib")
_USUAL_PICKLES = ("model.pkl", "model.pickle", "model.joblib")
_SAVE_AGAIN = "Load it where it was made, and save it with skops.io.dump(model, 'model.skops')"
_MOST_THREADS = 1024

log = logging.getLogger("headrace.backends")


class SklearnBackend:
    """`backend: "sklearn"`."""

    def usable_gpus(self, present: int) -> int:
        """None."""
        return 0

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """Inputs, outputs and batch size, as the model's attributes and a row of zeros tell them."""
        if is_declared(config):
            return None
        opened = _Opened(config, _model_file(config, files))
        return completion(config, Signature(opened.columns.ports, opened.usual_ports(config), {}))

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> SklearnModel:
        """Read the file, and hold the configuration against it."""
        opened = _Opened(config, _model_file(config, files))
        ports = opened.declared_ports(config)
        check_signature(config, Signature(opened.columns.ports, ports, {}))
        return SklearnModel(config, opened, ports)


class SklearnModel:
    """One version."""

    def __init__(self, config: ModelConfig, opened: _Opened, ports: Mapping[str, Port]) -> None:
        self._config = config
        self._opened: _Opened | None = opened
        self._ports = ports

    def open(self, placement: Placement) -> SklearnInstance:
        """An instance of the shared model."""
        if self._opened is None:
            raise Internal(f"model '{self._config.name}' is closed")
        return SklearnInstance(self._config, self._opened, self._ports)

    def close(self) -> None:
        """Let the model go."""
        self._opened = None


class SklearnInstance:
    """Computes with a model that instances share."""

    def __init__(self, config: ModelConfig, opened: _Opened, ports: Mapping[str, Port]) -> None:
        self._name = config.name
        self._columns = opened.columns
        self._model = opened.model
        self._ports = ports

    def compute(self, inputs: Mapping[str, Array], wanted: Collection[str]) -> Mapping[str, Array]:
        """Compute a batch."""
        table = self._columns.table(inputs)
        answers = {}
        for name in wanted:
            port = self._ports[name]
            width = -1 if port.shape is None else port.shape[1]
            if not table.shape[0]:
                answers[name] = np.empty((0, max(width, 1)), port.dtype.numpy if port.dtype else None)
                continue
            try:
                answer = _called(self._model, name, table)
            except Exception as error:
                log.exception("model %s could not compute a batch", self._name)
                raise self._explained(error, inputs) from None
            answers[name] = _shaped(answer, port)
        return answers

    def close(self) -> None:
        """Let the model go; the last of its instances and the version free it."""
        self._model = None

    def _explained(self, error: Exception, inputs: Mapping[str, Array]) -> HeadraceError:
        """scikit-learn says ValueError for what it does not like of its input: NaN, a category, text for a number."""
        if not isinstance(error, ValueError):
            return Internal(f"model '{self._name}' failed to compute this request; the server's log has the details")
        shapes = ", ".join(f"'{name}' {list(array.shape)}" for name, array in inputs.items())
        return InvalidArgument(
            f"model '{self._name}' does not accept the values of these inputs: {shapes}. It may have no way to treat "
            "missing values, or categories it was not trained with; the server's log says which"
        )


class _Opened:
    """A model, and what is known of its columns and outputs."""

    def __init__(self, config: ModelConfig, file: Path) -> None:
        self.model = _open(config, file)
        width = getattr(self.model, "n_features_in_", None)
        if width is None:
            # Models of text have no number of columns: each row is one text.
            width = sum(max((spec.dims or (1,))[-1], 1) for spec in config.inputs) or 1
        names = tuple(str(name) for name in getattr(self.model, "feature_names_in_", ()))
        self.columns = Columns(config, int(width), names, _COLUMN_TYPES, text=True)
        self._width = int(width)
        _forget_names(self.model)
        self._is_text = any(port.dtype is BYTES for port in self.columns.ports.values())
        _set_threads(self.model, number_of(config.parameters, "intra_op_thread_count", 1, _MOST_THREADS))

    def usual_ports(self, config: ModelConfig) -> dict[str, Port]:
        """For a configuration that leaves something out."""
        if config.outputs:
            return self.declared_ports(config)
        text = config.parameters.get("methods")
        if text is None:
            has_predict = hasattr(self.model, "predict")
            chosen = [name for name in ("predict", "predict_proba") if has_predict and hasattr(self.model, name)]
            chosen = chosen or ["transform"]
        else:
            chosen = [name.strip() for name in text.split(",")]
        ports = {}
        for name in chosen:
            port = self._tried(config, name)
            if port.shape is None:
                raise FailedPrecondition(
                    f"the outputs of model '{config.name}' are not known before it has computed something: write `input` "
                    "and `output` into its configuration"
                )
            ports[name] = port
        return ports

    def declared_ports(self, config: ModelConfig) -> dict[str, Port]:
        """Of every method that a configuration names, and the names of the others for its errors."""
        named = {spec.name for spec in config.outputs}
        known = [name for name in METHODS if hasattr(self.model, name)]
        return {name: self._tried(config, name) if name in named else Port(name, name, None, None) for name in known}

    def _tried(self, config: ModelConfig, name: str) -> Port:
        """What a method gives for a row of zeros. It has no shape where the row is refused."""
        if name not in METHODS or not hasattr(self.model, name):
            known = ", ".join(method for method in METHODS if hasattr(self.model, method))
            raise InvalidArgument(
                f"model '{config.name}', a {type(self.model).__name__}, has no method '{name[:64]}': use one of {known}"
            )
        declared = next((spec.dtype for spec in config.outputs if spec.name == name), None)
        try:
            if self._is_text:
                return Port(name, name, declared, None)
            answer = _called(self.model, name, np.zeros((1, self._width)))
            port = Port(name, name, dtype_of(answer), (-1, answer.size))
        except Exception:
            log.info("model %s: %s does not take a row of zeros", config.name, name, exc_info=True)
            return Port(name, name, declared, None)
        numbers = _COLUMN_TYPES if answer.dtype.kind in "iub" else (FP32, FP64)
        return port if port.dtype is BYTES else widened(port, config, numbers)


def _model_file(config: ModelConfig, files: ModelFiles) -> Path:
    """The file. A pickle in its place is named, with what to do."""
    if not config.default_model_filename and not (files.version_folder / DEFAULT_FILENAME).exists():
        pickles = [name for name in _USUAL_PICKLES if (files.version_folder / name).exists()]
        if pickles:
            raise _refused_pickle(config, pickles[0])
    file = model_path(config, files, DEFAULT_FILENAME)
    if file.suffix in _PICKLES:
        raise _refused_pickle(config, file.name)
    return file


def _refused_pickle(config: ModelConfig, name: str) -> InvalidArgument:
    return InvalidArgument(
        f"model '{config.name}': '{name[:128]}' is a pickle, which can run any code when it is opened, so it is not. "
        f"{_SAVE_AGAIN}"
    )


def _open(config: ModelConfig, file: Path) -> Any:
    try:
        model = open_skops(config, file)
    except HeadraceError:
        raise
    except Exception:
        # A file that is no archive, has a part missing, or has something else where skops expects its schema.
        log.exception("model %s: %s could not be opened", config.name, file)
        raise InvalidArgument(
            f"model '{config.name}': skops cannot read '{file.name}'. It is damaged, not a file that skops saved, or of "
            f"another version of scikit-learn; the server's log says which. {_SAVE_AGAIN}"
        ) from None
    if not isinstance(model, BaseEstimator):
        raise InvalidArgument(
            f"model '{config.name}': '{file.name}' has no model in it, but a {type(model).__name__}: save the model alone"
        )
    return model


def _set_threads(model: Any, threads: int) -> None:
    # As it was trained it may want all cores, or processes of its own, in each of its parts.
    for part in parts_of(model):
        if isinstance(part, BaseEstimator) and "n_jobs" in getattr(part, "__dict__", {}):
            # joblib's word for all cores is -1, ours is 0.
            part.n_jobs = threads or -1


def _forget_names(model: Any) -> None:
    # A table has no names of columns, of which scikit-learn would warn at every batch.
    for part in parts_of(model):
        if isinstance(part, BaseEstimator):
            getattr(part, "__dict__", {}).pop("feature_names_in_", None)


def _called(model: Any, name: str, table: Array) -> Array:
    answer = getattr(model, name)(table if _is_table(model) else table.ravel())
    if hasattr(answer, "toarray"):
        answer = answer.toarray()
    array = np.asarray(answer)
    return array.reshape(-1, 1) if array.ndim == 1 else array


def _is_table(model: Any) -> bool:
    """Models of text take a list of texts."""
    return hasattr(model, "n_features_in_")


def _shaped(answer: Array, port: Port) -> Array:
    if answer.dtype.kind in "UOS":
        raw = np.empty(answer.size, dtype=object)
        raw[:] = [item if isinstance(item, bytes) else str(item).encode() for item in answer.ravel()]
        return raw.reshape(answer.shape)
    return answer if port.dtype is None or port.dtype is BYTES else answer.astype(port.dtype.numpy, copy=False)
