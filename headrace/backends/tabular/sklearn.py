# SPDX-License-Identifier: Apache-2.0
"""The scikit-learn backend: models that skops saved as `model.skops`, on the CPU."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import skops.io
from sklearn.base import BaseEstimator
from sklearn.ensemble._hist_gradient_boosting.predictor import TreePredictor
from sklearn.tree._tree import Tree

from headrace.backends.contract import Array, EngineServices, ModelFiles, Placement
from headrace.backends.model_config import model_path, parse_int
from headrace.backends.signature import Port, Signature, check_signature, completion, is_declared
from headrace.backends.tabular.columns import Columns, output_sources, with_declared_dtype
from headrace.backends.tabular.forest import check_tree
from headrace.core.dtypes import BYTES, DTYPES, FP32, FP64, dtype_of
from headrace.core.errors import FailedPrecondition, HeadraceError, Internal, InvalidArgument
from headrace.models.config.types import ModelConfig

CHECKED_TYPES = tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in (Tree, TreePredictor))
TRUSTABLE = ("sklearn.", "scipy.interpolate.")

_SMALL = 1 << 30
_RATIO = 200


def open_skops(config: ModelConfig, file: Path) -> Any:
    """Load the model. Raise `InvalidArgument` for types that are not trusted, and other errors for an invalid file."""
    _check_sizes(file)
    allowed = _trusted_types(config)
    unknown = sorted(set(skops.io.get_untrusted_types(file=file)) - {*CHECKED_TYPES, *allowed})
    if unknown:
        names = ", ".join(f"'{name[:128]}'" for name in unknown[:8])
        can = [name for name in unknown if name.startswith(TRUSTABLE)]
        raise InvalidArgument(
            f"model '{config.name}': '{file.name}' needs types that are not trusted: {names}. "
            + (
                f"If you made the file yourself, write parameters: trusted_types = '{','.join([*allowed, *can])}'"
                if len(can) == len(unknown)
                else "They are neither of scikit-learn nor of scipy.interpolate, and could run any code: save the model "
                "without them, or serve it with the python backend"
            )
        )
    model = skops.io.load(file, trusted=[*CHECKED_TYPES, *allowed])
    _check_parts(config, model)
    return model


def parts_of(model: Any) -> Iterator[Any]:
    """Yield every object inside a model once."""
    seen: set[int] = set()
    pending = [model]
    while pending:
        part = pending.pop()
        if id(part) in seen or isinstance(part, (str, bytes, int, float, type(None))):
            continue
        seen.add(id(part))
        yield part
        if isinstance(part, Mapping):
            pending.extend(part.values())
        elif isinstance(part, (list, tuple, set, frozenset)):
            pending.extend(part)
        elif isinstance(part, np.ndarray):
            if part.dtype == object:
                pending.extend(part.ravel())
        else:
            pending.extend(getattr(part, "__dict__", {}).values())


def _check_sizes(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        unpacked = sum(member.file_size for member in archive.infolist())
    if unpacked > max(_SMALL, _RATIO * file.stat().st_size):
        raise ValueError(f"it unpacks to {unpacked} bytes")


def _trusted_types(config: ModelConfig) -> list[str]:
    names = [name.strip() for name in config.parameters.get("trusted_types", "").split(",") if name.strip()]
    for name in names:
        module, _, attribute = name.rpartition(".")
        kind = None
        if name.startswith(TRUSTABLE):
            try:
                kind = getattr(import_module(module), attribute, None)
            except ImportError:
                kind = None
        if not isinstance(kind, type):
            raise InvalidArgument(
                f"parameter trusted_types of model '{config.name}' names '{name[:128]}', which is not a class of "
                "scikit-learn or scipy.interpolate: only these can be trusted"
            )
    return names


def _check_parts(config: ModelConfig, model: Any) -> None:
    parts = list(parts_of(model))
    checked: set[int] = set()
    for part in parts:
        if isinstance(part, BaseEstimator):
            for tree, columns in _trees_of(part):
                checked.add(id(tree))
                _check_tree(tree, columns)
        if getattr(part, "input", None) in ("file", "filename"):
            raise InvalidArgument(
                f"model '{config.name}' has a {type(part).__name__} that opens the files its input names: callers could "
                "read the server's disk. Save it with input='content'"
            )
    if any(isinstance(part, (Tree, TreePredictor)) and id(part) not in checked for part in parts):
        raise ValueError("a tree is in an unexpected place")


def _trees_of(estimator: Any) -> Iterator[tuple[Any, int]]:
    """Yield each tree that a model evaluates, with the number of columns it uses; a shared tree comes once per user."""
    columns = getattr(estimator, "n_features_in_", 0)
    attributes = estimator.__dict__
    yield from ((part, columns) for part in parts_of(attributes.get("_predictors")) if isinstance(part, TreePredictor))
    if isinstance(attributes.get("tree_"), Tree):
        yield attributes["tree_"], columns
    members = list(np.asarray(attributes.get("estimators_", ()), dtype=object).ravel())
    # Some forests train each tree on a subset of the columns.
    chosen = attributes.get("estimators_features_") or [range(columns)] * len(members)
    for member, own in zip(members, chosen, strict=False):
        tree = getattr(member, "__dict__", {}).get("tree_")
        if isinstance(tree, Tree):
            yield tree, len(own)


def _check_tree(tree: Any, columns: int) -> None:
    if isinstance(tree, Tree):
        left, right = tree.children_left, tree.children_right
        splits = left != -1
        check_tree(left[splits], right[splits], tree.feature[splits], tree.node_count, columns)
        return
    nodes = tree.nodes
    splits = nodes[nodes["is_leaf"] == 0]
    check_tree(splits["left"], splits["right"], splits["feature_idx"], nodes.size, columns)
    categorical = splits[splits["is_categorical"] == 1]
    sets = min(len(tree.binned_left_cat_bitsets), len(tree.raw_left_cat_bitsets))
    if categorical.size and categorical["bitset_idx"].max() >= sets:
        raise ValueError("a node splits by missing categories")


DEFAULT_FILENAME = "model.skops"
METHODS = ("predict", "predict_proba", "predict_log_proba", "decision_function", "transform", "score_samples")

_COLUMN_TYPES = tuple(
    DTYPES[name]
    for name in ("FP64", "FP32", "INT64", "INT32", "INT16", "INT8", "UINT64", "UINT32", "UINT16", "UINT8", "BOOL")
)
_PICKLES = (".pkl", ".pickle", ".joblib")
_PICKLE_NAMES = ("model.pkl", "model.pickle", "model.joblib")
_SAVE_AGAIN = "Load it where it was made, and save it with skops.io.dump(model, 'model.skops')"
_MAX_THREADS = 1024

log = logging.getLogger("headrace.backends")


class SklearnBackend:
    """`backend: "sklearn"`."""

    def usable_gpus(self, present: int) -> int:
        """Return 0: scikit-learn runs on the CPU."""
        return 0

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """Return inputs, outputs and batch size, from the model's attributes and its results for a row of zeros."""
        if is_declared(config):
            return None
        opened = _LoadedModel(config, _model_file(config, files))
        return completion(config, Signature(opened.columns.ports, opened.default_ports(config), {}))

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> SklearnModel:
        """Read the file and check the configuration against it."""
        opened = _LoadedModel(config, _model_file(config, files))
        ports = opened.declared_ports(config)
        check_signature(config, Signature(opened.columns.ports, ports, {}))
        return SklearnModel(config, opened, ports)


class SklearnModel:
    """One version: a scikit-learn model."""

    def __init__(self, config: ModelConfig, opened: _LoadedModel, ports: Mapping[str, Port]) -> None:
        self._config = config
        self._opened: _LoadedModel | None = opened
        self._ports = ports

    def open(self, placement: Placement) -> SklearnInstance:
        """Create an instance of the shared model."""
        if self._opened is None:
            raise Internal(f"model '{self._config.name}' is closed")
        return SklearnInstance(self._config, self._opened, self._ports)

    def close(self) -> None:
        """Release the model."""
        self._opened = None


class SklearnInstance:
    """Runs a model that instances share."""

    def __init__(self, config: ModelConfig, opened: _LoadedModel, ports: Mapping[str, Port]) -> None:
        self._name = config.name
        self._columns = opened.columns
        self._model = opened.model
        self._ports = ports

    def compute(self, inputs: Mapping[str, Array], requested: Collection[str]) -> Mapping[str, Array]:
        """Run a batch."""
        table = self._columns.table(inputs)
        answers = {}
        for name in requested:
            port = self._ports[name]
            width = -1 if port.shape is None else port.shape[1]
            if not table.shape[0]:
                answers[name] = np.empty((0, max(width, 1)), port.dtype.numpy if port.dtype else None)
                continue
            try:
                answer = _call_method(self._model, port.kind, table)
            except Exception as error:
                log.exception("model %s could not compute a batch", self._name)
                raise self._client_error(error, inputs) from None
            answers[name] = _shaped(answer, port)
        return answers

    def close(self) -> None:
        """Release the model; it is freed with the last reference."""
        self._model = None

    def _client_error(self, error: Exception, inputs: Mapping[str, Array]) -> HeadraceError:
        """Return the error for the client. scikit-learn raises ValueError for bad input: NaN, categories, text."""
        if not isinstance(error, ValueError):
            return Internal(f"model '{self._name}' failed to compute this request; the server's log has the details")
        shapes = ", ".join(f"'{name}' {list(array.shape)}" for name, array in inputs.items())
        return InvalidArgument(
            f"model '{self._name}' does not accept the values of these inputs: {shapes}. It may have no way to treat "
            "missing values, or categories it was not trained with; the server's log says which"
        )


class _LoadedModel:
    """A loaded model with its columns and outputs."""

    def __init__(self, config: ModelConfig, file: Path) -> None:
        self.model = _open(config, file)
        width = getattr(self.model, "n_features_in_", None)
        if width is None:
            # Text models have no number of columns: each row is one string.
            width = sum(max((spec.dims or (1,))[-1], 1) for spec in config.inputs) or 1
        names = tuple(str(name) for name in getattr(self.model, "feature_names_in_", ()))
        self.columns = Columns(config, int(width), names, _COLUMN_TYPES, text=True)
        self._width = int(width)
        _drop_column_names(self.model)
        self._is_text = any(port.dtype is BYTES for port in self.columns.ports.values())
        _set_threads(self.model, parse_int(config.parameters, "intra_op_thread_count", 1, _MAX_THREADS))

    def default_ports(self, config: ModelConfig) -> dict[str, Port]:
        """Return the default ports, for a configuration that omits them."""
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
            port = self._probe(config, name)
            if port.shape is None:
                raise FailedPrecondition(
                    f"the outputs of model '{config.name}' are not known before it has computed something: write `input` "
                    "and `output` into its configuration"
                )
            ports[name] = port
        return ports

    def declared_ports(self, config: ModelConfig) -> dict[str, Port]:
        """Return the ports of the methods that the configuration names, and the names of the others for errors."""
        named = {spec.name for spec in config.outputs}
        known = [name for name in METHODS if hasattr(self.model, name)]
        if named <= set(known):
            return {
                name: self._probe(config, name) if name in named else Port(name, name, None, None) for name in known
            }
        # Names of the configuration's own: the parameter `methods` says in which order they are meant.
        chosen = [name.strip() for name in config.parameters.get("methods", "").split(",") if name.strip()]
        every = {name: self._probe(config, name) for name in dict.fromkeys([*chosen, *known])}
        sources = output_sources(config, every)
        return every | {name: self._probe(config, source, name) for name, source in sources.items()}

    def _probe(self, config: ModelConfig, method: str, name: str = "") -> Port:
        """Return the port of a method by its result for a row of zeros; no shape if the model rejects that row.

        The port's kind is the method; its name may be another that the configuration chose.
        """
        if method not in METHODS or not hasattr(self.model, method):
            known = ", ".join(known for known in METHODS if hasattr(self.model, known))
            raise InvalidArgument(
                f"model '{config.name}', a {type(self.model).__name__}, has no method '{method[:64]}': use one of {known}"
            )
        name = name or method
        declared = next((spec.dtype for spec in config.outputs if spec.name == name), None)
        try:
            if self._is_text:
                return Port(name, method, declared, None)
            answer = _call_method(self.model, method, np.zeros((1, self._width)))
            port = Port(name, method, dtype_of(answer), (-1, answer.size))
        except Exception:
            log.info("model %s: %s does not take a row of zeros", config.name, method, exc_info=True)
            return Port(name, method, declared, None)
        numbers = _COLUMN_TYPES if answer.dtype.kind in "iub" else (FP32, FP64)
        return port if port.dtype is BYTES else with_declared_dtype(port, config, numbers)


def _model_file(config: ModelConfig, files: ModelFiles) -> Path:
    """Return the model file. Reject a pickle with the steps to convert it."""
    if not config.default_model_filename and not (files.version_folder / DEFAULT_FILENAME).exists():
        pickles = [name for name in _PICKLE_NAMES if (files.version_folder / name).exists()]
        if pickles:
            raise _refused_pickle(config, pickles[0])
    file = model_path(config, files, DEFAULT_FILENAME)
    if file.suffix in _PICKLES:
        raise _refused_pickle(config, file.name)
    return file


def _refused_pickle(config: ModelConfig, name: str) -> InvalidArgument:
    return InvalidArgument(
        f"model '{config.name}': '{name[:128]}' is a pickle, which can run any code when it is opened, so Headrace does "
        f"not open it. {_SAVE_AGAIN}"
    )


def _open(config: ModelConfig, file: Path) -> Any:
    try:
        model = open_skops(config, file)
    except HeadraceError:
        raise
    except Exception:
        # A file that is not an archive, lacks a part, or does not have the schema that skops expects.
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
    # A trained estimator may ask for all cores, or for worker processes, in each of its parts.
    for part in parts_of(model):
        if isinstance(part, BaseEstimator) and "n_jobs" in getattr(part, "__dict__", {}):
            # joblib writes -1 for all cores, Headrace 0.
            part.n_jobs = threads or -1


def _drop_column_names(model: Any) -> None:
    # Tables have no column names here; scikit-learn would warn of it for every batch.
    for part in parts_of(model):
        if isinstance(part, BaseEstimator):
            getattr(part, "__dict__", {}).pop("feature_names_in_", None)


def _call_method(model: Any, name: str, table: Array) -> Array:
    answer = getattr(model, name)(table if _is_table(model) else table.ravel())
    if hasattr(answer, "toarray"):
        answer = answer.toarray()
    array = np.asarray(answer)
    return array.reshape(-1, 1) if array.ndim == 1 else array


def _is_table(model: Any) -> bool:
    """Return whether the model takes a table; text models take a list of strings."""
    return hasattr(model, "n_features_in_")


def _shaped(answer: Array, port: Port) -> Array:
    if answer.dtype.kind in "UOS":
        raw = np.empty(answer.size, dtype=object)
        raw[:] = [item if isinstance(item, bytes) else str(item).encode() for item in answer.ravel()]
        return raw.reshape(answer.shape)
    return answer if port.dtype is None or port.dtype is BYTES else answer.astype(port.dtype.numpy, copy=False)
