# SPDX-License-Identifier: Apache-2.0
"""Models that crash, allocate or loop while they load: in a repository from elsewhere, and in load requests."""

from __future__ import annotations

import base64
import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import tritonclient.grpc
from store_stub import ACCESS, SECRET, StoreStub
from tritonclient.utils import InferenceServerException
from v2_servers import ask, models_served

from support.faulty_backend import CONFIG, add_faulty_model, install_faulty_backend
from support.programs import Program
from support.serving import Serving
from support.tiny_models import CONFIG as ECHO
from support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

REQUEST = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}]}
CRASHED = "the process of the trial load of model 'm' version 1 ended (signal 11: segmentation fault): a file of it is"
TOO_LARGE = "MB of memory, and it may take 300.0 MB: free memory, or allow more with --trial-load-bytes"
FAULTY_JSON = {
    "backend": "faulty",
    "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [4]}],
    "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [4]}],
}
ONNX_JSON = {"backend": "onnxruntime"}


@pytest.fixture(autouse=True)
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_faulty_backend(tmp_path / "site", monkeypatch)


@contextmanager
def asked_all_the_time(server: Serving) -> Iterator[list[int]]:
    """A client of the good model, and the status of each of its answers."""
    statuses: list[int] = []
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(0.01):
            statuses.append(ask(server, "POST", "/v2/models/good/infer", REQUEST)[0])

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield statuses
    finally:
        ended.set()
        thread.join()


@contextmanager
def good_served(tmp_path: Path, **settings: Any) -> Iterator[Serving]:
    add_faulty_model(tmp_path / "models", "good", "good")
    settings = {"mode": "explicit", "load_models": ("*",), "trial_load_bytes": 300_000_000} | settings
    with models_served(tmp_path / "models", **settings) as server, asked_all_the_time(server) as statuses:
        yield server
        before = len(statuses)
        eventually(lambda: len(statuses) > before + 2)
    assert set(statuses) == {200}


def load(server: Serving, protocol: str, config: dict[str, Any], file: str, content: bytes) -> tuple[Any, str]:
    """Load model m with a file; the status and the text of the refusal."""
    text = json.dumps(config)
    if protocol == "http":
        parameters = {"config": text, f"file:1/{file}": base64.b64encode(content).decode()}
        status, answer = ask(server, "POST", "/v2/repository/models/m/load", {"parameters": parameters})
        return status, answer["error"] if answer else ""
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        try:
            client.load_model("m", config=text, files={f"file:1/{file}": content})
        except InferenceServerException as error:
            return error.status().removeprefix("StatusCode."), error.message()
        return "OK", ""


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_file_in_a_load_request(tmp_path: Path, protocol: str) -> None:
    with good_served(tmp_path) as server:
        for config, file, content, http, grpc, text in (
            (FAULTY_JSON, "model.faulty", b"crash", 409, "FAILED_PRECONDITION", CRASHED),
            (FAULTY_JSON, "model.faulty", b"allocate", 429, "RESOURCE_EXHAUSTED", TOO_LARGE),
            (FAULTY_JSON, "model.faulty", b"error", 500, "INTERNAL", "KeyError while loading model 'm' version 1; the"),
            (ONNX_JSON, "model.onnx", b"no ONNX", 400, "INVALID_ARGUMENT", "model.onnx"),
        ):
            status, reply = load(server, protocol, config, file, content)
            assert (status, text in reply) == (http if protocol == "http" else grpc, True), reply
            assert "secret" not in reply
            (entry,) = [
                model
                for model in ask(server, "POST", "/v2/repository/index", {})[1]
                if (model["name"], model.get("version")) == ("m", "1")
            ]
            assert entry["state"] == "UNAVAILABLE" and text in entry["reason"]
        assert load(server, protocol, FAULTY_JSON, "model.faulty", b"good") == (200 if protocol == "http" else "OK", "")
        assert ask(server, "POST", "/v2/models/m/infer", REQUEST)[0] == 200


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_file_that_keeps_its_library_busy_for_ever(tmp_path: Path, protocol: str) -> None:
    # The good model is a local one: it is not tried, and loads in far less than this.
    with good_served(tmp_path, load_seconds=4.0) as server:
        status, reply = load(server, protocol, FAULTY_JSON, "model.faulty", b"loop")
        assert status in (504, "DEADLINE_EXCEEDED")
        assert "was not loaded within 4 s: see the server's log, or allow more with --model-load-timeout" in reply
        eventually(lambda: not trials(psutil.Process()))


def test_a_repository_in_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = {"models/good/config.pbtxt": ECHO.encode(), "models/good/1/": b""}
    for how in ("crash", "allocate", "loop", "good"):
        objects[f"models/faulty-{how}/config.pbtxt"] = CONFIG.encode()
        objects[f"models/faulty-{how}/1/model.faulty"] = how.encode()
    options = ("--strict-readiness=false", "--trial-load-bytes", "300000000", "--http-port", "0", "--grpc-port", "0")
    with StoreStub({"bkt": objects}) as stub:
        environment = {
            "AWS_ACCESS_KEY_ID": ACCESS,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-west-1",
            "AWS_ENDPOINT_URL": stub.url(""),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }
        with Program("serve", "s3://bkt/models", *options, log=tmp_path / "log", env=environment) as server:
            server.wait_for("model 'good' version 1 is ready")
            server.wait_for("model 'faulty-good' version 1 is ready")
            reasons = eventually(lambda: failed(server.url, 2))
            assert "ended (signal 11: segmentation fault)" in reasons["faulty-crash"]
            assert TOO_LARGE in reasons["faulty-allocate"]
            assert "Fatal Python error: Segmentation fault" in server.log
            (looping,) = eventually(lambda: trials(psutil.Process(server.pid)))
            assert Path(f"/proc/{looping.pid}/oom_score_adj").read_text() == "1000\n"
        # The server has ended well, and the trial that was still running with it.
        eventually(lambda: not looping.is_running() or looping.status() == psutil.STATUS_ZOMBIE)


def trials(parent: psutil.Process) -> list[psutil.Process]:
    """The child processes that try a model."""
    found = []
    for child in parent.children():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if any("trial_process.py" in word for word in child.cmdline()):
                found.append(child)
    return found


def failed(url: str, count: int) -> dict[str, str]:
    """The reasons of the models that could not be loaded, once there are so many."""
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v2/repository/index", b"{}"), timeout=60) as answer:
        index = json.load(answer)
    reasons = {model["name"]: model["reason"] for model in index if model.get("state") == "UNAVAILABLE"}
    return reasons if len(reasons) == count else {}
