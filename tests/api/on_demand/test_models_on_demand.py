# SPDX-License-Identifier: Apache-2.0
"""A request to a model that is not loaded loads it, in every protocol; and what each protocol says when it cannot."""

from __future__ import annotations

import json
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from websockets.sync.client import connect

from headrace.api.predict.grpc import SERVICE as PREDICT
from headrace.api.predict.grpc import predict_schema
from headrace.api.v1.messages import SERVICE as V1
from headrace.api.v1.messages import message_class
from headrace.api.v2.grpc_messages import SERVICE as V2
from headrace.api.v2.grpc_messages import inference_schema
from support.servers import ThreadServer, serve_in_thread
from support.tiny_models import CONFIG, write_models

ROW = [1.0, 2.0, 3.0, 4.0]
RAW = struct.pack("<4f", *ROW)
BAD = CONFIG.replace("dims: [ 4 ] }\noutput", "dimms: [ 4 ] }\noutput")
HUGE = 50_000_000
EMBEDDING = """backend: "python"
input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "embedding" data_type: TYPE_FP32 dims: [ 2 ] }
"""
EMBEDDING_PY = """
import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        return [pb.InferenceResponse([pb.Tensor("embedding", np.array([0.6, 0.8], np.float32))]) for _ in requests]
"""
NAMES = [
    "v2",
    "v2raw",
    "v2class",
    "v2meta",
    "v2conf",
    "v2gen",
    "v2grpc",
    "v2stream",
    "v2gmeta",
    "predict",
    "predictgrpc",
    "predictstream",
    "socket",
    "v1",
    "v1grpc",
    "v1stream",
    "spare",
    "plain",
]


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: Any


def ask(server: ThreadServer, path: str, body: Any = None, method: str = "", **headers: str) -> Answer:
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"{server.url}{path}", data, names, method=method or None)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            status, fields, text = response.status, dict(response.headers.items()), response.read()
    except urllib.error.HTTPError as error:
        status, fields, text = error.code, dict(error.headers.items()), error.read()
    fields = {name.lower(): value for name, value in fields.items()}
    return Answer(status, fields, json.loads(text) if "json" in fields.get("content-type", "") else text)


def resident(server: ThreadServer) -> list[str]:
    index = ask(server, "/v2/repository/index", {"ready": True}).body
    return sorted(entry["name"] for entry in index)


def v2_body(**more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": ROW}], **more}


@contextmanager
def on_demand(folder: Path, *arguments: str | Path) -> Iterator[ThreadServer]:
    with serve_in_thread(
        folder, "--model-control-mode", "on-demand", "--model-sizes-dir", folder / ".sizes", *arguments
    ) as server:
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadServer]:
    folder = tmp_path_factory.mktemp("on-demand") / "models"
    models: dict[str, dict[str, str]] = {name: {"config.pbtxt": CONFIG} for name in NAMES}
    models["v2class"] = {
        "config.pbtxt": CONFIG.replace("dims: [ 4 ] }\ndynamic", 'dims: [ 4 ] label_filename: "labels.txt" }\ndynamic'),
        "labels.txt": "cat\ndog\nbird\nfish\n",
    }
    models["embedder"] = {"config.pbtxt": EMBEDDING, "1/model.py": EMBEDDING_PY}
    models["bad"] = {"config.pbtxt": BAD}
    models["huge"] = {"config.pbtxt": CONFIG}
    write_models(folder, models)
    with open(folder / "huge" / "1" / "weights.bin", "wb") as file:
        file.truncate(HUGE)
    with on_demand(folder, "--host-memory-limit", str(HUGE - 1)) as server:
        yield server


@contextmanager
def channel(server: ThreadServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{server.ports[-1]}", [("grpc.use_local_subchannel_pool", 1)]) as opened:
        yield opened


def v2_message(name: str) -> Any:
    message = inference_schema().message("inference.ModelInferRequest")(model_name=name)
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 4])
    message.raw_input_contents.append(RAW)
    return message


def test_all_models_are_listed_and_ready_before_any_is_loaded(server: ThreadServer) -> None:
    index = {entry["name"]: entry for entry in ask(server, "/v2/repository/index", {}).body}
    assert index.keys() == {*NAMES, "bad", "huge", "embedder"}
    assert index["spare"]["state"] == "UNAVAILABLE"
    assert index["spare"]["reason"] == "not loaded: the first request that names it loads it"
    assert ask(server, "/v2/health/ready").status == 200
    assert ask(server, "/healthz").status == 200
    assert ask(server, "/v2/models/spare/ready").status == 200
    assert ask(server, "/v2/models/spare/versions/2/ready").status == 400
    assert ask(server, "/v2/models/bad/ready").status == 400
    assert ask(server, "/v2/models/unknown/ready").status == 400
    assert "spare" not in resident(server)


def test_v2_inference(server: ThreadServer) -> None:
    answer = ask(server, "/v2/models/v2/infer", v2_body(id="seven"))
    assert (answer.status, answer.body["id"], answer.body["outputs"][0]["data"]) == (200, "seven", ROW)
    assert float(answer.headers["headrace-model-wait"]) >= 0
    second = ask(server, "/v2/models/v2/infer", v2_body())
    assert second.status == 200
    assert "headrace-model-wait" not in second.headers
    raw = ask(server, "/v2/models/v2raw/infer", RAW, Inference_Header_Content_Length="0")
    assert raw.status == 200
    assert raw.body.endswith(RAW)
    assert "headrace-model-wait" in raw.headers
    classes = ask(
        server, "/v2/models/v2class/infer", v2_body(outputs=[{"name": "OUTPUT0", "parameters": {"classification": 1}}])
    )
    assert classes.body["outputs"][0]["data"] == ["4.000000:3:fish"]
    unknown = ask(server, "/v2/models/nope/infer", v2_body())
    assert (unknown.status, unknown.body["error"]) == (404, "Request for unknown model: 'nope' is not found")
    assert ask(server, "/v2/models/spare/versions/7/infer", v2_body()).status == 404
    assert "spare" not in resident(server)


def test_v2_metadata_configuration_and_generate(server: ThreadServer) -> None:
    assert ask(server, "/v2/models/v2meta").body["inputs"][0]["shape"] == [-1, 4]
    assert ask(server, "/v2/models/v2conf/config").body["max_batch_size"] == 8
    generated = ask(server, "/v2/models/v2gen/generate", {"INPUT0": ROW})
    assert (generated.status, generated.body["OUTPUT0"]) == (200, ROW)
    assert "headrace-model-wait" in generated.headers
    assert {"v2meta", "v2conf", "v2gen"} <= set(resident(server))


def test_v2_grpc(server: ThreadServer) -> None:
    schema = inference_schema()
    answer = schema.message("inference.ModelInferResponse")
    with channel(server) as opened:
        infer = opened.unary_unary(f"/{V2}/ModelInfer", lambda m: m.SerializeToString(), answer.FromString)
        response, call = infer.with_call(v2_message("v2grpc"), timeout=60)
        assert response.raw_output_contents[0] == RAW
        assert "headrace-model-wait" in dict(call.initial_metadata())
        stream = opened.stream_stream(
            f"/{V2}/ModelStreamInfer",
            lambda m: m.SerializeToString(),
            schema.message("inference.ModelStreamInferResponse").FromString,
        )
        answers = list(stream(iter([v2_message("v2stream"), v2_message("v2stream")]), timeout=60))
        assert [reply.infer_response.raw_output_contents[0] for reply in answers] == [RAW, RAW]
        metadata = opened.unary_unary(
            f"/{V2}/ModelMetadata",
            lambda m: m.SerializeToString(),
            schema.message("inference.ModelMetadataResponse").FromString,
        )
        request = schema.message("inference.ModelMetadataRequest")(name="v2gmeta")
        assert [spec.name for spec in metadata(request, timeout=60).inputs] == ["INPUT0"]


def test_predict(server: ThreadServer) -> None:
    answer = ask(server, "/predict/predict", {"inputs": ROW})
    assert (answer.status, answer.body["predictions"]) == (200, ROW)
    assert "headrace-model-wait" in answer.headers
    several = ask(server, "/predict", {"inputs": ROW})
    assert several.status == 400
    assert "several models" in several.body["error"]
    with channel(server) as opened:
        messages = predict_schema()
        request = messages.message("PredictRequest")(inputs=ROW)
        read = messages.message("PredictResponse").FromString
        unary = opened.unary_unary(f"/{PREDICT}/Predict", lambda m: m.SerializeToString(), read)
        assert list(unary(request, timeout=60, metadata=[("model", "predictgrpc")]).predictions) == ROW
        stream = opened.stream_stream(f"/{PREDICT}/PredictStream", lambda m: m.SerializeToString(), read)
        (reply,) = stream(iter([request]), timeout=60, metadata=[("model", "predictstream")])
        assert list(reply.predictions) == ROW


def test_a_web_socket_loads_its_model_again(server: ThreadServer) -> None:
    with connect(f"ws://127.0.0.1:{server.port}/predict/socket/stream") as socket:
        socket.send(json.dumps({"inputs": ROW}))
        assert json.loads(socket.recv(timeout=60))["predictions"] == ROW
        assert ask(server, "/v2/repository/models/socket/unload", {}).status == 200
        assert "socket" not in resident(server)
        socket.send(json.dumps({"inputs": ROW, "id": 2}))
        reply = json.loads(socket.recv(timeout=60))
        assert (reply["predictions"], reply["id"]) == (ROW, 2)


def test_v1(server: ThreadServer) -> None:
    header = 'batch_size: 1 input { name: "INPUT0" } output { name: "OUTPUT0" }'
    answer = ask(server, "/api/infer/v1", RAW, NV_InferRequest=header)
    assert (answer.status, answer.body[: len(RAW)]) == (200, RAW)
    assert "headrace-model-wait" in answer.headers
    failed = ask(server, "/api/infer/huge", RAW, NV_InferRequest=header)
    assert failed.status == 400
    assert "cannot fit" in failed.headers["nv-status"]
    missing = ask(server, "/api/infer/nope", RAW, NV_InferRequest=header)
    assert "unable to find platform" in missing.headers["nv-status"]
    with channel(server) as opened:
        read = message_class("InferResponse").FromString

        def request(name: str) -> Any:
            meta = {"batch_size": 1, "input": [{"name": "INPUT0"}], "output": [{"name": "OUTPUT0"}]}
            return message_class("InferRequest")(model_name=name, model_version=-1, meta_data=meta, raw_input=[RAW])

        unary = opened.unary_unary(f"/{V1}/Infer", lambda m: m.SerializeToString(), read)
        assert unary(request("v1grpc"), timeout=60).raw_output[0] == RAW
        assert "cannot fit" in unary(request("huge"), timeout=60).request_status.msg
        stream = opened.stream_stream(f"/{V1}/StreamInfer", lambda m: m.SerializeToString(), read)
        replies = list(stream(iter([request("v1stream"), request("huge"), request("v1stream")]), timeout=60))
        assert [list(reply.raw_output) for reply in replies] == [[RAW], [], [RAW]]
        assert "cannot fit" in replies[1].request_status.msg


def test_openai(server: ThreadServer) -> None:
    listed = {model["id"] for model in ask(server, "/v1/models").body["data"]}
    assert listed == {"embedder"}, "as its configuration is written"
    answer = ask(server, "/v1/embeddings", {"model": "embedder", "input": "hello"})
    assert answer.status == 200, answer.body
    assert answer.body["data"][0]["embedding"] == pytest.approx([0.6, 0.8])
    assert "headrace-model-wait" in answer.headers
    missing = ask(server, "/v1/embeddings", {"model": "nope", "input": "hello"})
    assert (missing.status, missing.body["error"]["code"]) == (404, "model_not_found")
    huge = ask(server, "/v1/embeddings", {"model": "huge", "input": "hello"})
    assert (huge.status, huge.body["error"]["type"]) == (400, "invalid_request_error")
    assert "cannot fit" in huge.body["error"]["message"]
    bad = ask(server, "/v1/embeddings", {"model": "bad", "input": "hello"})
    assert bad.status >= 400
    assert "error" in bad.body


def test_a_model_that_cannot_fit_or_load(server: ThreadServer) -> None:
    huge = ask(server, "/v2/models/huge/infer", v2_body())
    assert huge.status == 409
    assert (
        "model 'huge' cannot fit in host memory: 50.0 MB is more than the 50.0 MB of --host-memory-limit"
        in huge.body["error"]
    )
    bad = ask(server, "/v2/models/bad/infer", v2_body())
    assert bad.status in (400, 503), "503 while it is not tried again"
    assert "dimms" in bad.body["error"]
    soon = ask(server, "/v2/models/bad/infer", v2_body())
    assert soon.status == 503
    assert int(soon.headers["retry-after"]) >= 1
    with channel(server) as opened:
        infer = opened.unary_unary(f"/{V2}/ModelInfer", lambda m: m.SerializeToString(), bytes)
        with pytest.raises(grpc.RpcError) as failed:
            infer(v2_message("bad"), timeout=60)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        assert "retry-after" in dict(failed.value.trailing_metadata())  # type: ignore[attr-defined]


def test_load_and_unload_on_request(server: ThreadServer) -> None:
    assert ask(server, "/v2/repository/models/plain/load", {}).status == 200
    assert "plain" in resident(server)
    assert "headrace-model-wait" not in ask(server, "/v2/models/plain/infer", v2_body()).headers
    override = ask(server, "/v2/repository/models/plain/load", {"parameters": {"config": "{}"}})
    assert override.status == 400
    assert "leave out config and files" in override.body["error"]
    assert ask(server, "/v2/repository/models/plain/unload", {}).status == 200
    assert "plain" not in resident(server)


def test_metrics_and_console(server: ThreadServer) -> None:
    ask(server, "/v2/models/v2/infer", v2_body())
    metrics = ask(server, "/metrics").body.decode()
    assert 'headrace_model_loads_total{model="v2",result="loaded"} 1' in metrics
    assert 'headrace_model_loads_total{model="spare",result="loaded"} 0' in metrics
    assert 'headrace_model_waiting_requests{model="v2"} 0' in metrics
    assert f'headrace_model_memory_limit_bytes{{place="host"}} {HUGE - 1}' in metrics
    console = {model["name"]: model for model in ask(server, "/console/api/live").body["models"]}
    assert console["v2"]["residency"]["state"] == "resident"
    assert console["v2"]["reason"].startswith("resident")
    assert (console["spare"]["state"], console["spare"]["residency"]["state"]) == ("", "not loaded")


def test_a_wait_that_is_over_its_bound(tmp_path: Path) -> None:
    slow = """
import time
import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def initialize(self, args):
        time.sleep(2)

    def execute(self, requests):
        return [pb.InferenceResponse([pb.Tensor("OUTPUT0", np.zeros((1, 4), np.float32))]) for _ in requests]
"""
    config = CONFIG.replace('"identity"', '"python"')
    folder = write_models(tmp_path / "models", {"slow": {"config.pbtxt": config, "1/model.py": slow}})
    with on_demand(folder, "--model-wait-seconds", "0.05") as server:
        answer = ask(server, "/v2/models/slow/infer", v2_body())
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert "model 'slow' is not loaded after 0.05 s" in answer.body["error"]
        with channel(server) as opened:
            infer = opened.unary_unary(f"/{V2}/ModelInfer", lambda m: m.SerializeToString(), bytes)
            with pytest.raises(grpc.RpcError) as failed:
                infer(v2_message("slow"), timeout=60)
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        assert ask(server, "/v2/repository/models/slow/load", {}).status == 200, "this request waits for the load"
        assert ask(server, "/v2/models/slow/infer", v2_body()).status == 200


def test_options_that_exclude_each_other(tmp_path: Path) -> None:
    folder = write_models(tmp_path / "models", {"m": {"config.pbtxt": CONFIG}})
    for words, text in (
        (("--workers", "2"), "needs a single process"),
        (("--load-model", "*"), "name those to load or pin"),
    ):
        with pytest.raises(RuntimeError) as refused, on_demand(folder, *words):
            pass
        assert text in str(refused.value.__cause__)
    with pytest.raises(RuntimeError) as refused, serve_in_thread(folder, "--pin-model", "m"):
        pass
    assert "add --model-control-mode=on-demand" in str(refused.value.__cause__)
