# SPDX-License-Identifier: Apache-2.0
"""Dialects: how a workload is encoded as requests for a server, and its responses are decoded to numbers.

"v2" is the Open Inference Protocol with Triton's binary-tensor extension; "simple" is the {"input": [..]}
JSON that LitServe and mosec document, with the bare tensor bytes as its binary form (mosec). "own-call" is what
peers/own-call is told with; "predict" is the {"inputs": [..]} of `/predict`.
"""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tritonclient.grpc import service_pb2

from bench.workloads import Workload

GRPC_PATH = "/inference.GRPCInferenceService/ModelInfer"
OWN_CALL = "own-call"
PREDICT = "predict"
GRPC_PREFIX_BYTES = 5  # one byte "compressed?", four bytes length, before each gRPC message


@dataclass(frozen=True)
class Request:
    """What the load generators repeat; a gRPC body carries its five-byte prefix."""

    path: str
    headers: dict[str, str]
    body: bytes
    decode: Callable[[bytes, dict[str, str]], np.ndarray]


def request_for(workload: Workload, dialect: str) -> Request:
    """Spell the workload in the dialect."""
    return _SPELLINGS[dialect, workload.encoding](workload)


def _float_list(workload: Workload) -> list[float]:
    # The shortest decimal text of each float32, as a person or a JavaScript client would send it.
    return [float(str(value)) for value in workload.numbers().ravel()]


def _compact(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _v2_json(workload: Workload) -> Request:
    tensor = {"name": workload.input_name, "shape": workload.shape, "datatype": "FP32", "data": _float_list(workload)}

    def decode(body: bytes, headers: dict[str, str]) -> np.ndarray:
        return np.array(json.loads(body)["outputs"][0]["data"], dtype=np.float32).ravel()

    path = f"/v2/models/{workload.model}/infer"
    return Request(path, {"Content-Type": "application/json"}, _compact({"inputs": [tensor]}), decode)


def _v2_binary(workload: Workload) -> Request:
    raw = workload.numbers().tobytes()
    size = {"binary_data_size": len(raw)}
    tensor = {"name": workload.input_name, "shape": workload.shape, "datatype": "FP32", "parameters": size}
    header = _compact({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    headers = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(header)),
    }

    def decode(body: bytes, headers: dict[str, str]) -> np.ndarray:
        return np.frombuffer(body, dtype="<f4", offset=int(headers["inference-header-content-length"]))

    return Request(f"/v2/models/{workload.model}/infer", headers, header + raw, decode)


def _v2_grpc(workload: Workload) -> Request:
    message = service_pb2.ModelInferRequest(model_name=workload.model)
    message.inputs.add(name=workload.input_name, datatype="FP32", shape=workload.shape)
    message.raw_input_contents.append(workload.numbers().tobytes())
    text = message.SerializeToString()

    def decode(body: bytes, headers: dict[str, str]) -> np.ndarray:
        answer = service_pb2.ModelInferResponse.FromString(body)
        return np.frombuffer(answer.raw_output_contents[0], dtype="<f4")

    headers = {"content-type": "application/grpc", "te": "trailers"}
    return Request(GRPC_PATH, headers, b"\0" + struct.pack(">I", len(text)) + text, decode)


def _simple_json(workload: Workload) -> Request:
    def decode(body: bytes, headers: dict[str, str]) -> np.ndarray:
        return np.array(json.loads(body)["output"], dtype=np.float32).ravel()

    headers = {"Content-Type": "application/json"}
    return Request(f"/{workload.model}", headers, _compact({"input": _float_list(workload)}), decode)


def _predict(workload: Workload) -> Request:
    def decode(body: bytes, headers: dict[str, str]) -> np.ndarray:
        return np.array(json.loads(body)["predictions"], dtype=np.float32).ravel()

    return Request(
        "/predict", {"Content-Type": "application/json"}, _compact({"inputs": _float_list(workload)}), decode
    )


def _own_call(workload: Workload) -> Request:
    def decode(body: bytes, headers: dict[str, str]) -> np.ndarray:
        return np.frombuffer(body, dtype="<f4")

    return Request("/answer", {}, workload.numbers().tobytes(), decode)


def _simple_binary(workload: Workload) -> Request:
    def decode(body: bytes, headers: dict[str, str]) -> np.ndarray:
        return np.frombuffer(body, dtype="<f4")

    headers = {"Content-Type": "application/octet-stream"}
    return Request(f"/{workload.model}-raw", headers, workload.numbers().tobytes(), decode)


_SPELLINGS: dict[tuple[str, str], Callable[[Workload], Request]] = {
    ("v2", "json"): _v2_json,
    ("v2", "binary"): _v2_binary,
    ("v2", "grpc"): _v2_grpc,
    ("simple", "json"): _simple_json,
    ("simple", "binary"): _simple_binary,
    (OWN_CALL, "binary"): _own_call,
    (PREDICT, "json"): _predict,
}
