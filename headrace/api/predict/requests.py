# SPDX-License-Identifier: Apache-2.0
"""Parse requests of `/predict` into requests of the engine: one prediction, or a batch of them.

`RequestParser` parses JSON fields, for HTTP and the WebSocket. A batch becomes as few engine requests as the model
allows: rows of one shape are joined, up to `max_batch_size`. `FlatRequestParser` parses numbers without a shape, for
binary WebSocket messages and gRPC: they are the only input, in row-major order, and get the shape of the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from headrace.api.predict.models import ModelInfo, ModelInput, Models
from headrace.api.predict.validation import InputValidator, not_finite_error, parse_tensor, shape_of
from headrace.core.dtypes import BF16, BYTES, FP32, DType, bf16_to_float32, float32_to_bf16
from headrace.core.errors import HeadraceError, InvalidArgument
from headrace.core.names import nearest
from headrace.core.requests import GuidedRequest, InferRequest, InferResponse
from headrace.core.tensors import Buffer, Tensor
from headrace.net.http.heads import RequestHead

StickyKeyOf = Callable[[str, RequestHead, Mapping[str, object]], str]
"""Returns the sticky key of a request from its model, head and fields; "" for none."""

Row = Sequence[Tensor]
"""A request's tensors."""

Routing = tuple[str, bool]
"""A request's `sticky_key`, and whether it bypasses the response cache."""

MISSING = "Missing inputs"
FIELDS = frozenset(("inputs", "batch", "model_version"))
_NO_SUGGESTION = frozenset(("inputs", "batch", "id"))
"""Fields that an unknown field with a plain value is not a misspelling of."""
_CACHE_CONTROL = b"cache-control"
_FRESH = (b"no-cache", b"no-store")


_LABEL = "inputs"
_HELP = 'send {"inputs": [...]} or {"batch": [[...], ...]}'
_SPECIAL = (b"NaN", b"Infinity")


class Part(NamedTuple):
    """Rows of a batch that are computed together."""

    row: Row
    rows: int
    added: bool
    """Whether the leading dimension was added and is not the client's."""


class ParsedRequest:
    """A parsed request for one prediction."""

    __slots__ = ("added", "engine_request", "model", "routing")

    parts: Sequence[Part] | None = None
    """The parts of a batch; None for one prediction."""
    is_split = False
    """Whether it needs more than one engine request."""

    def __init__(self, model: ModelInfo, version: str, routing: Routing | None, row: Row, added: bool) -> None:
        self.model = model
        self.routing = routing
        self.added = added
        """Whether the leading dimension was added and is not the client's."""
        self.engine_request = self.request_for(row, version) if routing else InferRequest(model.name, row, version)
        """The engine request; for a batch, that of the first part."""

    def request_for(self, row: Row, version: str) -> InferRequest:
        """Return an engine request for the same model."""
        if self.routing is None:
            return InferRequest(self.model.name, row, version)
        key, fresh = self.routing
        return GuidedRequest(self.model.name, row, version, sticky_key=key, bypass_cache=fresh)


class ParsedBatch(ParsedRequest):
    """A parsed request for a batch of predictions."""

    __slots__ = ("is_split", "parts")

    def __init__(self, model: ModelInfo, version: str, routing: Routing | None, parts: Sequence[Part]) -> None:
        super().__init__(model, version, routing, parts[0].row, parts[0].added)
        self.parts = parts
        self.is_split = len(parts) > 1


class RequestParser:
    """Parses the JSON fields of requests. `more_fields` are additional fields that `key_of` uses."""

    def __init__(
        self,
        models: Models,
        validator: InputValidator,
        key_of: StickyKeyOf | None = None,
        more_fields: Collection[str] = (),
        *,
        fields: frozenset[str] = FIELDS,
        obeys_cache_control: bool = True,
    ) -> None:
        self._models = models
        self._validator = validator
        self._key_of = key_of
        self._fields = fields
        self._more_fields = more_fields
        """Its content may change."""
        self._cache_control = _CACHE_CONTROL if obeys_cache_control else b""

    def parse(self, name: str, head: RequestHead, fields: Mapping[str, Any]) -> ParsedRequest:
        """Parse a request for a model."""
        if not fields.keys() <= self._fields and not (fields.keys() - self._fields).issubset(self._more_fields):
            self._check_unknown(fields)
        model, version = self._models.find(name, fields.get("model_version"))
        routing = None
        if self._key_of is not None or self._cache_control in head.by_name:
            routing = self.routing(name, head, fields)
        if "inputs" in fields:
            if "batch" in fields:
                raise InvalidArgument("send 'inputs' or 'batch', not both")
            values = fields["inputs"]
            only = model.only_input
            if only is not None and type(values) is list:
                tensor, added = only.tensor("inputs", values)
                return ParsedRequest(model, version, routing, (tensor,), added)
            part = self._row(model, "inputs", values)
            return ParsedRequest(model, version, routing, part.row, part.added)
        if "batch" not in fields:
            raise InvalidArgument(f'{MISSING}: send {{"inputs": [...]}} or {{"batch": [[...], ...]}}')
        return ParsedBatch(model, version, routing, self._batch(model, fields["batch"]))

    def routing(self, name: str, head: RequestHead, fields: Mapping[str, object]) -> Routing | None:
        """Return the sticky key and whether to bypass the cache; None for neither."""
        control = head.by_name.get(self._cache_control)
        fresh = control is not None and any(directive in control.lower() for directive in _FRESH)
        key = self._key_of(name, head, fields) if self._key_of is not None else ""
        return (key, fresh) if key or fresh else None

    def find(self, name: str, wanted: object = None) -> tuple[ModelInfo, str]:
        """Return a model, and the version number for a label or number."""
        return self._models.find(name, wanted)

    def _row(self, model: ModelInfo, label: str, values: Any) -> Part:
        """Parse one prediction's inputs: a list for the only input, or an object by input name."""
        if not isinstance(values, dict):
            if model.only_input is None:
                raise InvalidArgument(
                    f"model '{model.name}' has several inputs: send {label} as an object with {model.input_names()}"
                )
            if values is None or isinstance(values, str):
                raise InvalidArgument(f"{label} must be a list of values, or an object with lists by input name")
            tensor, added = model.only_input.tensor(label, values)
            return Part((tensor,), 1, added)
        tensors = []
        all_added = True
        for name, value in values.items():
            spec = model.inputs.get(name)
            if spec is None:
                near = _suggestion(name, model.inputs)
                raise InvalidArgument(f"{label}: model '{model.name}' has no input {_quoted(name)}{near}")
            tensor, added = spec.tensor(f"{label}.{name}", value)
            all_added &= added
            tensors.append(tensor)
        missing = [name for name, spec in model.inputs.items() if name not in values and not spec.optional]
        if missing or not tensors:
            raise InvalidArgument(f"{label} lacks {', '.join(map(_quoted, missing)) or 'values'}")
        return Part(tensors, 1, all_added)

    def _batch(self, model: ModelInfo, rows: Any) -> Sequence[Part]:
        if not isinstance(rows, list):
            raise InvalidArgument("'batch' must be a list of rows, each as 'inputs' would be")
        self._validator.check_rows(len(rows))
        if model.max_batch_size and model.only_input is not None and not isinstance(rows[0], dict):
            try:
                return self._together(model, model.only_input, rows)
            except HeadraceError:
                pass  # parse row by row, which may work, or at least explains the error
        parts = [self._row(model, f"batch[{index}]", row) for index, row in enumerate(rows)]
        return list(_join(parts, model.max_batch_size)) if model.max_batch_size > 1 else parts

    def _together(self, model: ModelInfo, only: ModelInput, rows: list[Any]) -> Sequence[Part]:
        """Parse rows of one shape together."""
        shape, added = only.row_shape("batch[0]", shape_of(rows[0]))
        if only.dtype is None:
            raise InvalidArgument("any type: parse row by row")
        joined = parse_tensor("batch", only.name, only.dtype, (len(rows), *shape), rows)
        if self._validator.bounds:
            self._validator.check_bounds("batch", only.dtype, joined.array)
        most = model.max_batch_size
        if len(rows) <= most:
            return (Part((joined,), len(rows), added),)
        pieces = [joined.array[start : start + most] for start in range(0, len(rows), most)]
        return [Part((Tensor(joined.name, joined.dtype, piece),), len(piece), added) for piece in pieces]

    def _check_unknown(self, fields: Mapping[str, Any]) -> None:
        """Accept additional plain fields of the client, such as a user id; raise for a misspelt field."""
        names = self._fields.union(self._more_fields)
        for name in fields.keys() - names:
            if isinstance(fields[name], (str, int)) and not _suggestion(name, names - _NO_SUGGESTION):
                continue
            near = _suggestion(name, names) or f": the fields are {', '.join(sorted(names))}"
            raise InvalidArgument(f"the request has no field {_quoted(name)}{near}")


def _join(parts: Sequence[Part], most: int) -> Sequence[Part]:
    """Join neighbouring parts of one shape."""
    joined: list[Part] = []
    for _, alike in groupby(parts, lambda part: [(tensor.name, tensor.dtype, tensor.shape) for tensor in part.row]):
        group = list(alike)
        for start in range(0, len(group), most):
            piece = group[start : start + most]
            tensors = [
                Tensor(first.name, first.dtype, np.concatenate([part.row[index].array for part in piece]))
                for index, first in enumerate(piece[0].row)
            ]
            joined.append(Part(tensors, len(piece), piece[0].added))
    return joined


def _suggestion(name: str, names: Collection[str]) -> str:
    near = nearest(name, names, 0.55)
    return f": did you mean '{near}'?" if near else ""


def _quoted(name: str) -> str:
    return ascii(name[:64])


class FlatRequestParser:
    """Parses numbers without a shape."""

    def __init__(self, parser: RequestParser, validator: InputValidator) -> None:
        self._parser = parser
        self._validator = validator

    def parse_raw(self, name: str, head: RequestHead, data: bytes) -> ParsedRequest:
        """Parse little-endian numbers of the model's own type."""
        model, version = self._parser.find(name)
        only = _only(model)
        dtype = only.dtype or FP32
        if dtype is BYTES:
            raise InvalidArgument(f"model '{model.name}' takes strings: send JSON")
        if len(data) % dtype.item_bytes:
            raise InvalidArgument(
                f"{len(data)} bytes are not a multiple of {dtype.item_bytes}, the size of {dtype.name}"
            )
        numbers = np.frombuffer(data, dtype.numpy)
        if dtype.numpy.kind == "f":
            self._validator.check_finite(numbers)
        elif dtype is BF16:
            self._validator.check_finite(bf16_to_float32(numbers))
        return self._request(model, version, only, dtype, numbers, head)

    def parse_floats(
        self, name: str, wanted: str, head: RequestHead, numbers: npt.NDArray[np.float32]
    ) -> ParsedRequest:
        """Parse floats and convert them to the model's type."""
        model, version = self._parser.find(name, wanted)
        only = _only(model)
        self._validator.check_finite(numbers)
        dtype = only.dtype or FP32
        cast = numbers if dtype is FP32 else _cast(model.name, dtype, numbers)
        return self._request(model, version, only, dtype, cast, head)

    def _request(
        self, model: ModelInfo, version: str, only: ModelInput, dtype: DType, numbers: Any, head: RequestHead
    ) -> ParsedRequest:
        shape, added = only.counted_shape(_LABEL, len(numbers))
        if self._validator.bounds:
            self._validator.check_bounds(_LABEL, dtype, numbers)
        tensor = Tensor(only.name, dtype, numbers.reshape((1, *shape) if only.batched else shape))
        routing = self._parser.routing(model.name, head, {})
        return ParsedRequest(model, version, routing, (tensor,), added)


def only_output(request: ParsedRequest, response: InferResponse) -> Tensor:
    """Return the output of a model that has exactly one, of numbers."""
    if len(response.outputs) != 1:
        names = ", ".join(f"'{tensor.name}'" for tensor in response.outputs)
        raise InvalidArgument(f"model '{request.model.name}' has several outputs, {names}: use JSON over HTTP")
    tensor = response.outputs[0]
    if tensor.dtype is BYTES:
        raise InvalidArgument(f"model '{request.model.name}' returns strings: use JSON over HTTP")
    return tensor


def _only(model: ModelInfo) -> ModelInput:
    if model.only_input is None:
        raise InvalidArgument(
            f"model '{model.name}' has several inputs, {model.input_names()}: send them by name, in JSON over HTTP"
        )
    return model.only_input


def _cast(model: str, dtype: DType, numbers: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    if dtype is BF16:
        return float32_to_bf16(numbers)
    kind = dtype.numpy.kind
    if kind not in "iuf":
        raise InvalidArgument(f"model '{model}' takes {dtype.name}, not numbers: use JSON over HTTP")
    with np.errstate(all="ignore"):
        cast = numbers.astype(dtype.numpy)
    if kind != "f" and not np.array_equal(cast.astype(np.float64), numbers.astype(np.float64)):
        raise InvalidArgument(f"model '{model}' takes {dtype.name}: send integers that fit it")
    if kind == "f" and not np.array_equal(np.isfinite(cast), np.isfinite(numbers)):
        raise InvalidArgument(f"{_LABEL} has values that do not fit {dtype.name}")
    return cast


def parse_json(body: Buffer | str, validator: InputValidator) -> Mapping[str, Any]:
    """Parse a JSON object. NaN and infinities are errors, unless the settings accept them."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        fields = _parse_lenient(body, error, validator)
    if type(fields) is not dict:
        raise InvalidArgument(f"the request must be a JSON object: {_HELP}")
    return fields


def _parse_lenient(body: Buffer | str, error: orjson.JSONDecodeError, validator: InputValidator) -> Any:
    """Parse a body that orjson refused, perhaps only because of NaN or infinity, which Python's json accepts."""
    content = body.encode(errors="replace") if isinstance(body, str) else bytes(body)
    if not content.strip():
        raise InvalidArgument(f"the request is empty: {_HELP}")
    if any(literal in content for literal in _SPECIAL) or "infinity" in str(error):
        try:
            fields = json.loads(content)
            orjson.dumps(fields)  # raises for invalid text and numbers that orjson cannot write
        except (ValueError, TypeError, RecursionError):
            pass
        else:
            if validator.finite:
                raise not_finite_error()
            return fields
    raise InvalidArgument(f"the request is not JSON ({error}): {_HELP}") from None
