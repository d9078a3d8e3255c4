# SPDX-License-Identifier: Apache-2.0
"""Scale to zero in a warm process: an idle server's models sleep, and its replica stays; real servers behind a router."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from activation_router import ActivationRouter, ScriptedScaler, activation_router
from routing import ask

from headrace.cli.router_settings import router_settings
from headrace.core.errors import InvalidArgument
from headrace.fleet.router.settings import LocalService
from support.servers import ThreadServer, serve_in_thread
from support.serving import echo_site, serving
from support.tiny_models import CONFIG
from support.waiting import eventually

LOCAL = LocalService("/tmp/fleet", "chat")
TORCH = """backend: "pytorch"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 3 ] }
"""
ROW = json.dumps({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}).encode()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    saved = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(torch.nn.Linear(4, 3).eval()), saved)
    for name, config in {"torch": TORCH, "echo": CONFIG}.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
    (folder / "torch" / "1" / "model.pt").write_bytes(saved.getvalue())
    return folder


def port_of(server: ThreadServer) -> int:
    return int(server.url.rpartition(":")[2])


def reason(server: ThreadServer) -> str:
    index = json.loads(ask(port_of(server), "POST", "/v2/repository/index", b"{}").body)
    return next(str(entry.get("reason", "")) for entry in index if entry["name"] == "torch")


def status(router: ActivationRouter) -> Any:
    return json.loads(ask(router.port, "GET", "/router/status").body)


def test_models_sleep_in_a_replica_that_stays(models: Path) -> None:
    scaler = ScriptedScaler(wanted=1, ready=1)
    with (
        serve_in_thread(models) as server,
        activation_router(port_of(server), scaler=scaler, local=LOCAL, sleep_level=2) as router,
    ):
        before = ask(router.port, "POST", "/v2/models/torch/infer", ROW)
        assert before.status == 200
        for _ in range(3):
            router.idle_for(3500)
            assert reason(server) == ""
            router.idle_for(200)
            eventually(lambda: status(router)["waking"]["models_asleep"] == ["torch"])
            assert reason(server) == "asleep at level 2: the next request wakes it"
            router.idle_for(10_000)  # it is not put to sleep again and again
            assert (router.state, scaler.asked) == ("awake", [])
            answer = ask(router.port, "POST", "/v2/models/torch/infer", ROW)
            assert (answer.status, answer.body) == (200, before.body)
            assert reason(server) == ""
            router.idle_for(1)
            assert status(router)["waking"]["models_asleep"] == []
        assert router.activator.activations == 0


@pytest.mark.parametrize(
    "bounds", [{"sleep_level": 2}, {"local": LOCAL}, {}], ids=["in a cluster", "no level", "neither"]
)
def test_otherwise_targets_are_scaled_to_zero(models: Path, bounds: dict[str, Any]) -> None:
    scaler = ScriptedScaler(wanted=1, ready=1)
    with serve_in_thread(models) as server, activation_router(port_of(server), scaler=scaler, **bounds) as router:
        router.idle_for()
        router.becomes("asleep")
        assert [replicas for _, replicas in scaler.asked] == [0]
        assert reason(server) == ""


def test_a_server_that_has_no_sleep_is_scaled_to_zero() -> None:
    scaler = ScriptedScaler(wanted=1, ready=1)
    with (
        serving(echo_site()) as server,
        activation_router(server.port, scaler=scaler, local=LOCAL, sleep_level=1) as router,
    ):
        router.idle_for()
        eventually(lambda: router.activator._cannot_sleep)
        router.idle_for(1)
        router.becomes("asleep")
        assert [replicas for _, replicas in scaler.asked] == [0]


def test_the_level_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    text = "backends: [http://chat:8080]\nactivation:\n  sleep_level: {}\n  targets:\n    - name: chat-engine\n"
    path.write_text(text.format(1))
    activation = router_settings({}, str(path)).router.activation
    assert activation is not None
    assert activation.sleep_level == 1
    path.write_text(text.format(3))
    with pytest.raises(InvalidArgument, match=r"router.yaml:3: activation.sleep_level is 1 \(weights in host memory\)"):
        router_settings({}, str(path))
