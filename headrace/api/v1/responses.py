# SPDX-License-Identifier: Apache-2.0
"""Encode the engine's response: an InferResponseHeader of the client's generation, and the raw outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.api.classification import top_classes
from headrace.api.v1.headers import Header, HeaderOutput
from headrace.api.v1.messages import message_class
from headrace.api.v1.requests import AcceptedRequest
from headrace.api.v1.shared_memory import Placement
from headrace.core.dtypes import BF16, BOOL, BYTES, FP16
from headrace.core.errors import Internal, InvalidArgument
from headrace.core.requests import InferResponse
from headrace.core.tensors import Buffer, Tensor
from headrace.engine.dataplane import ServingVersion

_NOT_CLASSIFIED = (BOOL, FP16, BF16, BYTES)
_LARGEST_V0_VERSION = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class EncodedResponse:
    """A response in parts."""

    header: Any
    """The InferResponseHeader of the client's generation."""
    raw: list[Buffer]
    """One for each requested output; empty for classifications and outputs in shared memory."""


def empty_header(header: Header | None) -> Any:
    """Return the header of a failed request: only the id, which v0 does not have."""
    if header is None or header.is_v0:
        return message_class("v0.InferResponseHeader")()
    return message_class("InferResponseHeader")(id=header.id)


def encode_response(accepted: AcceptedRequest, response: InferResponse) -> EncodedResponse:
    """Encode a response; raise if a requested output is invalid."""
    header, serving = accepted.header, accepted.serving
    tensors = {tensor.name: tensor for tensor in response.outputs}
    wanted: Sequence[HeaderOutput] = header.outputs
    placements: Sequence[Placement | None] = accepted.placements
    if not wanted:
        wanted = [HeaderOutput(name) for name in tensors]
        placements = [None] * len(wanted)
    version = int(response.model_version)
    if header.is_v0:
        message = message_class("v0.InferResponseHeader")(model_version=min(version, _LARGEST_V0_VERSION))
    else:
        message = message_class("InferResponseHeader")(model_version=version, id=header.id)
    message.model_name = response.model_name
    message.batch_size = header.batch_size
    encoded = EncodedResponse(message, [])
    for output, placement in zip(wanted, placements, strict=True):
        tensor = tensors.get(output.name)
        if tensor is None:
            raise Internal(f"model '{response.model_name}' returned no output '{output.name}'")
        entry = message.output.add(name=output.name)
        if not header.is_v0:
            entry.data_type = tensor.dtype.config_name
        data: Buffer = b""
        if output.classes is not None:
            _classify(entry, output, output.classes, tensor, serving, header)
        else:
            data = _raw(entry, output, tensor, serving, header)
            if placement is not None:
                placement.write(output.name, data)
                data = b""
        encoded.raw.append(data)
    return encoded


def _raw(entry: Any, output: HeaderOutput, tensor: Tensor, serving: ServingVersion, header: Header) -> Buffer:
    data = tensor.to_buffer()
    if header.is_v0:
        entry.raw.byte_size = _entry_size(output, len(data), header, needed=bool(header.outputs))
    else:
        entry.raw.dims.extend(tensor.shape[1:] if serving.config.max_batch_size else tensor.shape)
        entry.raw.batch_byte_size = len(data)
    return data


def _classify(
    entry: Any, output: HeaderOutput, count: int, tensor: Tensor, serving: ServingVersion, header: Header
) -> None:
    if tensor.dtype in _NOT_CLASSIFIED:
        raise InvalidArgument(
            f"class result not available for output '{output.name}' due to unsupported type "
            f"'{tensor.dtype.config_name}'"
        )
    if header.is_v0:
        _entry_size(output, tensor.array.nbytes, header, needed=False)
    labels = serving.labels.get(output.name, ())
    batched = serving.config.max_batch_size > 0
    for row in top_classes(tensor, count, labels, batched=batched):
        classes = entry.batch_classes.add()
        for score in row:
            classes.cls.add(idx=score.idx, value=score.value, label=score.label)


def _entry_size(output: HeaderOutput, size: int, header: Header, *, needed: bool) -> int:
    """v0: return the bytes of one entry of the batch; the client's size must match, since it splits the outputs by it."""
    entry_bytes = size // header.batch_size
    if (needed or output.byte_size) and output.byte_size != entry_bytes:
        raise Internal(
            f"unexpected output size {output.byte_size} for inference output '{output.name}', expecting {entry_bytes}"
        )
    return entry_bytes
