# SPDX-License-Identifier: Apache-2.0
"""A header and the data that came with it, held against the model and made into a request for the engine.

Called by `http` and `grpc`. The texts, the codes and the order of checks are those of 0.8, except for what only v1 can
say. Sizes are checked here, since this protocol gives neither types nor, in v0, shapes; the engine checks the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.api.v1.accounts import V1Accounts
from headrace.api.v1.data import Data, Pieces
from headrace.api.v1.headers import Header, HeaderInput, Region
from headrace.api.v1.images import image_hint
from headrace.api.v1.shapes import dims_as_given, dims_by_size, size_as_given
from headrace.api.v1.shared_memory import Placement, Reader, SharedMemory, granted
from headrace.core.errors import HeadraceError, Internal, InvalidArgument, NotFound, Unavailable
from headrace.core.limits import TENSOR_COUNT
from headrace.core.messages import InferRequest, RequestedOutput
from headrace.core.tensors import Buffer, Tensor, element_count, tensor_from_buffer
from headrace.engine.dataplane import DataPlane, ServingVersion
from headrace.models.config.types import InputSpec, ModelConfig, SequenceBatching

_SHOWN = 256
"""So much of a client's name is shown in an error."""


class Ticket:
    """The number of a request; 0 until it has reached the core."""

    __slots__ = ("_accounts", "number")

    def __init__(self, accounts: V1Accounts) -> None:
        self._accounts = accounts
        self.number = 0

    def take(self) -> None:
        """The request has reached the core."""
        self.number = self._accounts.next_id()


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that can be computed, and what its answer will need."""

    request: InferRequest
    header: Header
    serving: ServingVersion
    """The version it will reach."""
    placements: tuple[Placement | None, ...]
    """Where in shared memory each requested output goes; None for those that travel with the answer."""


def decode_request(
    plane: DataPlane,
    ticket: Ticket,
    name: str,
    version: str,
    header: Header | None,
    data: Data,
    memory: SharedMemory | None,
) -> Accepted:
    """The request for the engine. Raises what is wrong with it."""
    if header is None:
        raise InvalidArgument(
            f"unable to parse request for model '{name[:_SHOWN]}': the request header must be an InferRequestHeader, in "
            'text for example: batch_size: 1 input { name: "input" } output { name: "output" cls { count: 3 } }'
        )
    if not header.is_v0:
        ticket.take()
    if not header.batch_size:
        raise InvalidArgument(
            "inference request batch-size must be >= 1 for models that support batching, and must be 1 for models that "
            "don't support batching"
        )
    if header.is_v0:
        if data.size is not None and data.size > header.batch_size * sum(each.byte_size for each in header.inputs):
            serving = plane.find(name, version)
            specs = {} if serving is None else sent_by_clients(serving.config)
            raise _additional(name, data, next(iter(specs.values()), None))
        ticket.take()
    serving = serving_version(plane, name, version)
    try:
        inputs = _Reading(serving.config, header, data, memory).tensors()
        placements = tuple(_placement(memory, each.region) for each in header.outputs)
    except HeadraceError as error:
        serving.statistics.failed(0, error, 0)
        raise
    outputs = [RequestedOutput(output) for output in dict.fromkeys(each.name for each in header.outputs)]
    request = InferRequest(name, inputs, version, str(header.id) if header.id else "", outputs, header.parameters)
    return Accepted(request, header, serving, placements)


def serving_version(plane: DataPlane, name: str, version: str) -> ServingVersion:
    """The version that a request asks for."""
    found = plane.find(name, version)
    if found is not None:
        return found
    if not (plane.started and plane.accepting):
        raise Unavailable("Server not ready")
    known = [entry for entry in plane.states() if entry.name == name]
    if not known:
        raise InvalidArgument(f"unable to find platform for requested model '{name[:_SHOWN]}'")
    asked = f"Specific({name}, {version[:32]})" if version else f"Latest({name})"
    reasons = [entry.reason for entry in known if entry.reason and version in ("", entry.version)]
    why = f": {reasons[-1]}" if reasons else ""
    raise NotFound(f"Servable not found for request: {asked}{why}")


def _placement(memory: SharedMemory | None, region: Region | None) -> Placement | None:
    return None if region is None else granted(memory).placement(region.name, region.offset, region.byte_size)


class _Reading:
    """Makes the tensors of one request."""

    def __init__(self, config: ModelConfig, header: Header, data: Data, memory: SharedMemory | None) -> None:
        self._config = config
        self._name = config.name
        self._header = header
        self._data = data
        self._memory = memory
        self._reader: Reader | None = None
        self._rows = (header.batch_size,) if config.max_batch_size else ()

    def tensors(self) -> list[Tensor]:
        """All of them. Raises what is wrong with the first that is."""
        header, data = self._header, self._data
        specs = sent_by_clients(self._config)
        count = len(header.inputs)
        if max(count, len(header.outputs)) > TENSOR_COUNT:
            raise InvalidArgument(f"at most {TENSOR_COUNT} inputs and outputs are allowed")
        if not sum(not spec.optional for spec in specs.values()) <= count <= len(specs):
            raise InvalidArgument(f"expected {len(specs)} inputs but got {count}")
        most = max(self._config.max_batch_size, 1)
        if header.batch_size > most:
            raise InvalidArgument(
                f"unexpected batch size {header.batch_size} for '{self._name}', max allowed is {most}"
            )
        made = []
        for given in header.inputs:
            spec = specs.get(given.name)
            if spec is None:
                raise InvalidArgument(f"unexpected inference input '{given.name[:_SHOWN]}' for '{self._name}'")
            made.append(self._tensor(spec, given))
        if data.rest and isinstance(data, Pieces):
            raise InvalidArgument(
                f"unexpected additional input data for model '{self._name}': give one raw_input for each input"
            )
        if data.rest:
            raise _additional(self._name, data, next(iter(specs.values()), None))
        return made

    def _tensor(self, spec: InputSpec, given: HeaderInput) -> Tensor:
        dtype = spec.dtype
        if dtype is None or spec.dims is None:
            raise InvalidArgument(
                f"input '{spec.name}' of model '{self._name}' takes any type and shape, which this protocol cannot tell: "
                f"use v2 (/v2/models/{self._name}/infer)"
            )
        if self._header.is_v0:
            dims = dims_by_size(spec, spec.dims, dtype, given.byte_size)
            size: int | None = self._header.batch_size * given.byte_size
        else:
            dims = dims_as_given(self._config, spec, spec.dims, given)
            count = self._header.batch_size * element_count(spec.name, dims)
            size = size_as_given(self._config, spec, given, dtype, count)
        piece = self._piece(spec, given, size)
        return tensor_from_buffer(spec.name, dtype, (*self._rows, *dims), piece)

    def _piece(self, spec: InputSpec, given: HeaderInput, size: int | None) -> Buffer:
        """The bytes of an input."""
        if given.region is not None:
            return self._shared(spec, given.region, size)
        piece = self._data.take(size)
        if size is None or len(piece) == size:
            return piece
        hint = image_hint(piece, spec)
        if self._header.is_v0:
            raise Internal(f"expected {size} of data for inference input '{spec.name}', got {len(piece)}{hint}")
        raise InvalidArgument(
            f"unexpected size {len(piece)} for input '{spec.name}', expecting {size} bytes for model '{self._name}'{hint}"
        )

    def _shared(self, spec: InputSpec, region: Region, size: int | None) -> Buffer:
        if size is not None and region.byte_size != size:
            raise InvalidArgument(
                f"unexpected shared-memory size {region.byte_size} for input '{spec.name}', expecting {size} for model "
                f"'{self._name}'"
            )
        if self._reader is None:
            self._reader = granted(self._memory).reader()
        return self._reader.read(region.name, region.offset, region.byte_size)


def sent_by_clients(config: ModelConfig) -> dict[str, InputSpec]:
    """A model's inputs by name, without those that the engine makes itself."""
    made = {name for described in config.batch_inputs for name in described.target_names}
    if isinstance(config.scheduling, SequenceBatching):
        made |= {control.name for control in config.scheduling.controls}
        made |= {state.input_name for state in config.scheduling.states}
    return {spec.name: spec for spec in config.inputs if spec.name not in made}


def _additional(name: str, data: Data, spec: InputSpec | None) -> InvalidArgument:
    hint = image_hint(data.start(), spec)
    return InvalidArgument(f"unexpected additional input data for model '{name[:_SHOWN]}'{hint}")
