# SPDX-License-Identifier: Apache-2.0
"""The model and version of a request, and what is derived from a model's configuration.

Derived are how inputs are parsed, how outputs are written, and the labels of versions. `Models.find` runs for every
request: it asks the data plane each time, since models are loaded and unloaded, and caches what it derived until the
configuration changes. A version label (`v1.2.0` for version 2) comes from the model's parameter `version_labels`:
`1=v1.0.0,2=v1.2.0`.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from headrace.api.predict.settings import PredictSettings
from headrace.api.predict.validation import Dims, InputValidator, guess_dtype, is_ragged, parse_tensor, shape_of
from headrace.core.dtypes import FP32, FP64
from headrace.core.errors import HeadraceError, InvalidArgument, NotFound, Unavailable
from headrace.core.names import check_name, parse_version
from headrace.core.tensors import Tensor
from headrace.engine.dataplane import DataPlane
from headrace.models.config.types import InputSpec, ModelConfig, OutputSpec, fits

_SHOWN = 16


_NUMBERS = frozenset((int, float))
log = logging.getLogger("headrace.api")
PARAMETER = "version_labels"
LATEST = "latest"


class Models:
    """The models of a data plane."""

    def __init__(self, plane: DataPlane, settings: PredictSettings, validator: InputValidator) -> None:
        self._plane = plane
        self._default = settings.model
        self._validator = validator
        self._cache: dict[tuple[str, str], ModelInfo] = {}

    def default(self) -> str:
        """Return the model of a request that names none."""
        if self._default:
            return self._default
        names = self._plane.known_names()
        if len(names) == 1:
            return names[0]
        if not names:
            raise Unavailable("Model not loaded: no model is ready; try again later")
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        raise InvalidArgument(f"the server has several models: send the request to /predict/NAME. The models: {shown}")

    def find(self, name: str, wanted: object = None) -> tuple[ModelInfo, str]:
        """Return a model, and the version number for a label or number; "" for any serving version."""
        model = self._info(name, "")
        if wanted is None or wanted in ("", LATEST):
            return model, ""
        if isinstance(wanted, bool) or not isinstance(wanted, str | int):
            raise InvalidArgument("'model_version' must be a string such as \"v1.0.0\", or an integer")
        number = model.labels.number(str(wanted)[:256])
        try:
            return self._info(name, number), number
        except NotFound:
            versions = self._plane.metadata(name).versions
            shown = ", ".join(model.labels.label(version) for version in versions[:_SHOWN])
            raise NotFound(
                f"model '{name}' has no version {str(wanted)[:32]!a}: it has {shown}; "
                "leave model_version out for the newest"
            ) from None

    def _info(self, name: str, version: str) -> ModelInfo:
        serving = self._plane.find(name, version)
        if serving is None:
            self._cache.pop((name, version), None)
            # Raises the reason: the model is loading, failed to load, or does not exist.
            config = self._plane.config(name, version)
        else:
            config = serving.config
        info = self._cache.get((name, version))
        if info is None or info.config is not config:
            info = self._cache[name, version] = ModelInfo(config, self._validator)
        return info


class ModelInput:
    """How one input is parsed."""

    __slots__ = (
        "_count",
        "_open",
        "_pack",
        "_size",
        "_validator",
        "batched",
        "dims",
        "dtype",
        "fixed",
        "model",
        "name",
        "optional",
    )

    def __init__(self, spec: InputSpec, config: ModelConfig, validator: InputValidator) -> None:
        self.model = config.name
        self.name = spec.name
        self.dtype = spec.dtype
        self.dims = spec.dims
        self.optional = spec.optional
        self.batched = config.max_batch_size > 0
        self.fixed = self.dims is not None and -1 not in self.dims
        self._open = self.dims.count(-1) if self.dims is not None else 0
        self._count = math.prod(size for size in self.dims or () if size != -1)
        self._validator = validator
        vector = self.batched and self.fixed and self.dims is not None and len(self.dims) == 1
        plain = vector and self.dtype in (FP32, FP64)
        self._size = self.dims[0] if plain and self.dims else -1
        """The size of a vector of floats, the usual input, which is packed directly; -1 for others."""
        self._pack = struct.Struct(f"<{self._size}{self.dtype.struct_code}").pack if plain and self.dtype else None

    def tensor(self, label: str, values: Any) -> tuple[Tensor, bool]:
        """Convert one prediction's values; return whether a leading dimension was added that is not the batch."""
        pack = self._pack
        if (
            pack is None
            or type(values) is not list
            or len(values) != self._size
            or not _NUMBERS.issuperset(map(type, values))
        ):
            return self._tensor(label, values)
        try:
            data = pack(*values)
        except (struct.error, OverflowError):
            raise InvalidArgument(f"{label} has values that do not fit {self._type_name}") from None
        tensor = Tensor(self.name, self.dtype, np.ndarray((1, self._size), self.dtype.numpy, data))  # type: ignore[arg-type,union-attr]
        if self._validator.bounds:
            self._validator.check_bounds(label, tensor.dtype, tensor.array)
        return tensor, False

    def _tensor(self, label: str, values: Any) -> tuple[Tensor, bool]:
        try:
            row, added = self.row_shape(label, shape_of(values))
        except InvalidArgument:
            if is_ragged(values):
                raise InvalidArgument(f"{label} is ragged: all its rows must have the same length") from None
            raise
        dtype = self.dtype or guess_dtype(values)
        tensor = parse_tensor(label, self.name, dtype, (1, *row) if self.batched else row, values)
        if self._validator.bounds:
            self._validator.check_bounds(label, dtype, tensor.array)
        return tensor, added

    def row_shape(self, label: str, shape: Dims) -> tuple[Dims, bool]:
        """Return the shape for the model, without the batch, from the shape that was sent; and whether one was added."""
        dims = self.dims
        if dims is None:
            self._validator.check_size(label, shape)
            return shape, False
        if self.fixed and shape == dims:
            return shape, False
        self._validator.check_size(label, shape)
        if fits(shape, dims):
            return shape, False
        if self.batched:
            if shape[:1] == (1,) and fits(shape[1:], dims):
                return shape[1:], False
        elif fits((1, *shape), dims):
            return (1, *shape), True
        if shape == () and dims == (1,):
            return dims, False
        raise self._wrong_shape(label, shape)

    def counted_shape(self, label: str, count: int) -> tuple[Dims, bool]:
        """Return the shape for `count` numbers without a shape."""
        dims = self.dims
        if dims is None or self._open > 1:
            return self.row_shape(label, (count,))
        rest = self._count
        if not self._open:
            if count == rest:
                return dims, False
        elif rest and count % rest == 0:
            self._validator.check_size(label, (count,))
            return tuple(count // rest if size == -1 else size for size in dims), False
        self._validator.check_size(label, (count,))
        raise InvalidArgument(f"{label} has {count} values, but {self._takes()}")

    @property
    def _type_name(self) -> str:
        return self.dtype.name if self.dtype is not None else "any type"

    def _takes(self) -> str:
        dims = "any shape" if self.dims is None else f"shape {_format_shape(self.dims)}"
        return f"model '{self.model}' takes {dims} of {self._type_name}"

    def _wrong_shape(self, label: str, shape: Dims) -> InvalidArgument:
        text = f"{label} has shape {_format_shape(shape)}, but {self._takes()}"
        if self.batched and self.dims is not None and len(shape) == len(self.dims) + 1:
            text += '; send several rows as {"batch": [...]}'
        return InvalidArgument(text)


class ModelOutput:
    """How one output is written."""

    __slots__ = ("_ones", "row", "single")

    def __init__(self, spec: OutputSpec | None, batched: bool) -> None:
        dims = spec.dims if spec is not None else None
        self._ones = tuple(size == 1 for size in dims) if dims is not None else ()
        fixed = dims is not None and -1 not in dims
        self.row = self.row_shape(dims) if fixed and dims is not None else None
        """The written shape of one prediction, if it is fixed."""
        self.single = (1, *dims) if fixed and batched and dims is not None else None
        """The model's shape of one prediction, if it is fixed."""

    def row_shape(self, shape: Dims, added: bool = False) -> Dims:
        """Return a prediction's shape without the dimensions that are always 1; at least one dimension stays."""
        # Dimensions that only happen to be 1 stay: else the shape of a response would depend on the length of an input.
        ones = self._ones if len(self._ones) == len(shape) else (False,) * len(shape)
        kept = [
            size
            for index, (size, always) in enumerate(zip(shape, ones, strict=True))
            if size != 1 or not (always or (added and index == 0))
        ]
        return tuple(kept) or (1,)


class ModelInfo:
    """What is derived from the configuration of one model version."""

    def __init__(self, config: ModelConfig, validator: InputValidator) -> None:
        self.config = config
        self.name = config.name
        self.max_batch_size = config.max_batch_size
        self.decoupled = config.decoupled
        self.labels = parse_labels(config.parameters.get(PARAMETER, ""), config.name)
        self.inputs: Mapping[str, ModelInput] = {
            spec.name: ModelInput(spec, config, validator) for spec in config.inputs
        }
        required = [spec for spec in self.inputs.values() if not spec.optional] or list(self.inputs.values())
        self.only_input = required[0] if len(required) == 1 else None
        """The input that needs no name; None if there are several."""
        self.outputs: Mapping[str, ModelOutput] = {
            spec.name: ModelOutput(spec, self.max_batch_size > 0) for spec in config.outputs
        }
        self.one_output = len(config.outputs) == 1
        plain = self.one_output and config.outputs[0].dtype in (FP32, FP64)
        self.plain = self.outputs[config.outputs[0].name] if plain else None
        """The only output, if it has floats that orjson writes directly."""
        self._tails: dict[str, bytes] = {}

    def tail(self, version: str) -> bytes:
        """Return the JSON after the predictions of a version, up to the latency."""
        tail = self._tails.get(version)
        if tail is None:
            label = orjson.dumps(self.labels.label(version))
            tail = self._tails[version] = b',"model_version":%b,"latency_ms":' % label
        return tail

    def input_names(self) -> str:
        """Return the names of the inputs for error messages."""
        return ", ".join(f"'{name}'" for name in self.inputs)


def _format_shape(shape: Dims) -> str:
    return f"[{', '.join(map(str, shape))}]"


class VersionLabels:
    """Maps version numbers to labels and back, for one model."""

    __slots__ = ("_labels", "_numbers")

    def __init__(self, by_number: Mapping[str, str]) -> None:
        self._labels = dict(by_number)
        self._numbers = {label: number for number, label in by_number.items()}

    def label(self, number: str) -> str:
        """Return the label of a version number, or the number."""
        return self._labels.get(number, number)

    def number(self, text: str) -> str:
        """Return the version number of a label; any other text unchanged."""
        return self._numbers.get(text, text)


def parse_labels(text: str, model: str) -> VersionLabels:
    """Parse the parameter; log and skip invalid entries."""
    labels: dict[str, str] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        number, _, label = (part.strip() for part in entry.partition("="))
        try:
            number = str(parse_version(number))
            check_name(label, "version label")
            if label == LATEST or label in labels.values():
                raise ValueError
        except (HeadraceError, ValueError):
            log.warning(
                "ignoring a version label: write %s as 1=v1.0.0,2=v1.2.0, each label once and none 'latest'",
                PARAMETER,
                extra={"model": model, "entry": entry[:64]},
            )
            continue
        labels[number] = label
    return VersionLabels(labels)
