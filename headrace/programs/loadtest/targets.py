# SPDX-License-Identifier: Apache-2.0
"""From a model, its inputs and a protocol to a target: the request is encoded here, once. Called by `running`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import quote

import numpy as np

from headrace.client.addresses import Address
from headrace.client.grpc_messages import encode_inference as encode_grpc
from headrace.client.http import model_path
from headrace.client.http1 import request_head
from headrace.client.http_connections import tls_context
from headrace.client.http_messages import HEADER_LENGTH, encode_inference, to_json
from headrace.client.requests import Inference
from headrace.client.transport import Options
from headrace.core.dtypes import BF16, BYTES, bf16_to_float32
from headrace.core.errors import InvalidArgument
from headrace.core.tensors import Tensor
from headrace.programs.loadtest.grpc_lane import GrpcTarget
from headrace.programs.loadtest.http_lane import HttpTarget
from headrace.programs.loadtest.lanes import Target

ProtocolName = Literal["http", "grpc", "predict"]


def protocol_of(address: Address, wanted: str) -> ProtocolName:
    """The protocol that an address and a wish mean together."""
    if wanted not in ("", "http", "grpc", "predict"):
        raise InvalidArgument(f"protocol {wanted!a} is not known: it is http, grpc or predict")
    if address.is_grpc:
        if wanted in ("http", "predict"):
            raise InvalidArgument(f"{address} is an address for gRPC: give http://HOST:8000 for protocol {wanted}")
        return "grpc"
    if wanted == "grpc":
        raise InvalidArgument(f"{address} is an address for HTTP: give --url grpc://HOST:8001 for protocol grpc")
    return "predict" if wanted == "predict" else "http"


def target_of(
    address: Address, protocol: ProtocolName, inference: Inference, options: Options, batched: bool
) -> Target:
    """A target. `batched` says whether the first dimension of the model's inputs is its batch."""
    if protocol == "grpc":
        return GrpcTarget(address, encode_grpc(inference), options)
    tls = tls_context(options) if address.secure else None
    if protocol == "predict":
        body = to_json(_prediction(inference, batched))
        path, fields = f"/predict/{quote(inference.model, safe='')}", [("content-type", "application/json")]
    else:
        length, buffers = encode_inference(inference)
        body = b"".join(buffers)
        path = model_path(inference.model, inference.version) + "/infer"
        fields = [("content-type", "application/octet-stream"), (HEADER_LENGTH, str(length))]
    own = [("host", address.authority), *options.fields, *fields]
    head = request_head("POST", address.prefix + path, own, len(body))
    return HttpTarget(address, head + body, tls)


def _prediction(inference: Inference, batched: bool) -> dict[str, Any]:
    """The body of a request to `/predict`: one prediction, or a batch of them."""
    arrays = {tensor.name: _plain(tensor) for tensor, _ in inference.inputs}
    said: dict[str, Any] = {"model_version": inference.version} if inference.version else {}
    if not batched:
        return said | {"inputs": _one(arrays)}
    rows = {len(array) for array in arrays.values()}
    if len(rows) != 1:
        raise InvalidArgument("the inputs have different numbers of rows: give all of them the same")
    each = [_one({name: array[row] for name, array in arrays.items()}) for row in range(rows.pop())]
    return said | ({"inputs": each[0]} if len(each) == 1 else {"batch": each})


def _one(arrays: Mapping[str, Any]) -> Any:
    values = {name: array.tolist() for name, array in arrays.items()}
    return next(iter(values.values())) if len(values) == 1 else values


def _plain(tensor: Tensor) -> Any:
    """An array whose `tolist` is JSON."""
    if tensor.dtype is BF16:
        return bf16_to_float32(tensor.array)
    if tensor.dtype is BYTES:
        texts = [element.decode(errors="replace") for element in tensor.array.ravel()]
        return np.array(texts, object).reshape(tensor.shape)
    return tensor.array
