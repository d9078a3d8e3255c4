# SPDX-License-Identifier: Apache-2.0
"""Models that sleep, over HTTP and by the command line: what wakes them, and what a server says that cannot do it."""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.llm_models import tiny_llama
from support.programs import BOTH_WORKERS_READY, Program, run
from support.servers import ThreadServer, serve_in_thread, serve_process
from support.tiny_models import CONFIG as IDENTITY
from support.waiting import eventually

LLM = """backend: "llm"
parameters { key: "kv_cache_bytes" value { string_value: "8388608" } }
parameters { key: "threads" value { string_value: "1" } }
"""
TORCH = """backend: "pytorch"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 3 ] }
"""
ENSEMBLE = """platform: "ensemble"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 3 ] }
ensemble_scheduling { step { model_name: "torch" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "OUTPUT__0" value: "y" } } }
"""
CHAT = {"messages": [{"role": "user", "content": "the quick brown fox"}], "temperature": 0, "max_tokens": 12}
ROW = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
CACHE = 8388608


class Answer(NamedTuple):
    status: int
    body: Any
    headers: dict[str, str]


def ask(server: ThreadServer | Program, path: str, body: Any = None, method: str = "POST") -> Answer:
    data = None if method == "GET" else b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{server.url}{path}", data, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            status, text, fields = response.status, response.read(), dict(response.headers.items())
    except urllib.error.HTTPError as error:
        status, text, fields = error.code, error.read(), dict(error.headers.items())
    try:
        return Answer(status, json.loads(text) if text else None, fields)
    except ValueError:
        return Answer(status, text.decode(), fields)


def make_models(folder: Path) -> Path:
    import torch

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * 2

    tiny_llama(folder / "llama" / "1")
    saved = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(Scaled().eval()), saved)
    for name, config in {"llama": LLM, "torch": TORCH, "both": ENSEMBLE, "echo": IDENTITY}.items():
        (folder / name / "1").mkdir(parents=True, exist_ok=True)
        (folder / name / "config.pbtxt").write_text(config)
    (folder / "torch" / "1" / "model.pt").write_bytes(saved.getvalue())
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[ThreadServer]:
    explicit = ("--model-control-mode", "explicit", "--load-model", "*", "--model-wait-seconds", "60")
    with serve_in_thread(models, *explicit) as running:
        yield running


def chat(server: ThreadServer | Program) -> str:
    answer = ask(server, "/v1/chat/completions", {"model": "llama", **CHAT})
    assert answer.status == 200, answer.body
    return str(answer.body["choices"][0]["message"]["content"])


def infer(server: ThreadServer | Program, name: str = "torch") -> list[float]:
    answer = ask(server, f"/v2/models/{name}/infer", ROW)
    assert answer.status == 200, answer.body
    numbers: list[float] = answer.body["outputs"][0]["data"]
    return numbers


def reason(server: ThreadServer | Program, name: str) -> str:
    (entry,) = (entry for entry in ask(server, "/v2/repository/index").body if entry["name"] == name)
    assert entry["state"] == "READY"  # a request would be answered
    return str(entry.get("reason", ""))


def level(server: ThreadServer | Program, name: str) -> float:
    text = str(ask(server, "/metrics", method="GET").body)
    (line,) = (line for line in text.splitlines() if line.startswith(f'headrace_model_asleep{{model="{name}"'))
    return float(line.rpartition(" ")[2])


@pytest.mark.parametrize("how", ["body", "query"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_language_model_answers_as_before(server: ThreadServer, depth: int, how: str) -> None:
    before = chat(server)
    body, query = ({"level": depth}, "") if how == "body" else (None, f"?level={depth}")
    answer = ask(server, f"/v1/models/llama/sleep{query}", body)
    assert answer.status == 200, answer.body
    version = answer.body["versions"]["1"]
    assert (answer.body["model"], version["state"], version["level"]) == ("llama", "asleep", depth)
    # On a CPU the weights stay in host memory at level 1.
    assert version["freed_bytes"]["host"] >= CACHE * 0.9 + (200_000 if depth == 2 else 0)
    assert reason(server, "llama") == f"asleep at level {depth}: the next request wakes it"
    assert level(server, "llama") == depth
    listed = ask(server, "/v1/models", method="GET").body["data"]
    assert "llama" in {model["id"] for model in listed}
    assert ask(server, "/v2/models/llama/ready", method="GET").status == 200
    assert ask(server, "/v2/models/llama/stats", method="GET").status == 200
    assert level(server, "llama") == depth  # nothing of this has woken it
    assert chat(server) == before
    assert (reason(server, "llama"), level(server, "llama")) == ("", 0)


@pytest.mark.parametrize("name", ["torch", "both"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_pytorch_model_answers_as_before(server: ThreadServer, depth: int, name: str) -> None:
    before = infer(server, name)
    answer = ask(server, "/v1/models/torch/sleep", {"level": depth})
    assert answer.body["versions"]["1"]["freed_bytes"] == ({} if depth == 1 else {"host": 60})
    assert infer(server, name) == before
    assert level(server, "torch") == 0


def test_level_1_is_the_default_and_wake_wakes(server: ThreadServer) -> None:
    before = chat(server)
    assert ask(server, "/v1/models/llama/sleep").body["versions"]["1"]["level"] == 1
    woken = ask(server, "/v1/models/llama/wake").body["versions"]["1"]
    assert (woken["state"], woken["level"], woken["freed_bytes"]) == ("awake", 0, {})
    assert level(server, "llama") == 0
    assert ask(server, "/v1/models/llama/wake").status == 200
    assert chat(server) == before


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("llama/sleep", {"level": 3}, 400, "level must be 1 (weights in host memory) or 2"),
        ("llama/sleep", {"level": True}, 400, "level must be 1"),
        ("llama/sleep", {"level": [1]}, 400, "level must be 1"),
        ("llama/sleep", {"deep": 1}, 400, "unknown member 'deep'"),
        ("llama/sleep?level=0", None, 400, "level must be 1"),
        ("llama/sleep", [1], 400, "must be a JSON object"),
        ("nobody/sleep", None, 404, "'nobody' is not found"),
        ("nobody/wake", None, 404, "'nobody' is not found"),
        ("..%2Fllama/sleep", None, 400, "path traversal"),
        ("echo/wake", None, 409, "model 'echo' cannot sleep"),
        ("echo/sleep", None, 409, "model 'echo' cannot sleep: backend 'identity' does not support it"),
        (
            "both/sleep",
            None,
            409,
            "model 'both' is an ensemble and has no memory: put the models of its steps to sleep",
        ),
    ],
)
def test_wrong_requests(server: ThreadServer, path: str, body: Any, status: int, told: str) -> None:
    answer = ask(server, f"/v1/models/{path}", body)
    assert answer.status == status, answer.body
    assert told in answer.body["error"]
    assert level(server, "llama") == 0


def test_another_method_is_refused(server: ThreadServer) -> None:
    answer = ask(server, "/v1/models/llama/sleep", method="GET")
    assert answer.status == 405
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize("asked", [chat, infer], ids=["llama", "torch"])
def test_requests_while_it_falls_asleep_and_wakes(server: ThreadServer, asked: Any) -> None:
    name = "llama" if asked is chat else "torch"
    expected, ended, sleeps = asked(server), threading.Event(), []

    def operator() -> None:
        while not ended.is_set():
            for depth in (2, 1):
                answer = ask(server, f"/v1/models/{name}/sleep", {"level": depth})
                sleeps.append(answer.status)
                time.sleep(0.005)

    with ThreadPoolExecutor(5) as threads:
        sleeping = threads.submit(operator)
        answers = [future.result() for future in [threads.submit(asked, server) for _ in range(40)]]
        ended.set()
        sleeping.result()
    assert answers == [expected] * 40
    assert set(sleeps) == {200}
    assert len(sleeps) >= 2
    assert asked(server) == expected


def test_it_is_unloaded_and_loaded_while_it_sleeps(server: ThreadServer) -> None:
    before = chat(server)
    for depth in (1, 2):
        ask(server, "/v1/models/llama/sleep", {"level": depth})
        assert ask(server, "/v2/repository/models/llama/unload", {}).status == 200
        assert ask(server, "/v1/models/llama/sleep").status == 404
        assert ask(server, "/v2/repository/models/llama/load", {}).status == 200
        assert level(server, "llama") == 0
        ask(server, "/v1/models/llama/sleep", {"level": depth})
        # Its files are the same, so that nothing is loaded again.
        assert ask(server, "/v2/repository/models/llama/load", {}).status == 200
        assert (reason(server, "llama"), level(server, "llama")) == ("", 0)
        assert chat(server) == before


def test_a_changed_model_is_loaded_while_it_sleeps(server: ThreadServer, models: Path) -> None:
    before = infer(server)
    ask(server, "/v1/models/torch/sleep", {"level": 2})
    config = models / "torch" / "config.pbtxt"
    config.write_text(TORCH.replace("max_batch_size: 8", "max_batch_size: 9"))
    try:
        assert ask(server, "/v2/repository/models/torch/load", {}).status == 200
        assert level(server, "torch") == 0
        assert infer(server) == before
        assert ask(server, "/v2/models/torch/config", method="GET").body["max_batch_size"] == 9
    finally:
        config.write_text(TORCH)
        assert ask(server, "/v2/repository/models/torch/load", {}).status == 200


def test_the_command_line(server: ThreadServer) -> None:
    before = chat(server)
    done = run("models", "sleep", "llama", "--level", "2", "--url", server.url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("llama version 1: asleep at level 2 after ")
    assert "MB of host memory given back" in done.stdout
    listed = json.loads(run("models", "list", "--url", server.url, "--json").stdout)
    (row,) = (row for row in listed if row["name"] == "llama")
    assert row["reason"].startswith("asleep at level 2")
    done = run("models", "wake", "llama", "--url", server.url, "--json")
    assert json.loads(done.stdout)["versions"]["1"]["state"] == "awake"
    done = run("models", "sleep", "echo", "--url", server.url)
    assert (done.returncode, "model 'echo' cannot sleep" in done.stderr) == (1, True)
    assert run("models", "sleep", "llama", "--level", "3", "--url", server.url).returncode == 2
    assert chat(server) == before


def test_the_console_shows_it(server: ThreadServer) -> None:
    def asleep() -> dict[str, Any]:
        live = ask(server, "/console/api/live", method="GET").body
        return {model["name"]: model.get("asleep", "cannot") for model in live["models"]}

    chat(server)
    assert asleep() == {"llama": False, "torch": False, "both": "cannot", "echo": "cannot"}
    ask(server, "/v1/models/llama/sleep", {"level": 2})
    assert asleep()["llama"] is True
    live = ask(server, "/console/api/live", method="GET").body
    (model,) = (model for model in live["models"] if model["name"] == "llama")
    assert (model["state"], model["reason"]) == ("READY", "asleep at level 2: the next request wakes it")
    chat(server)
    assert asleep()["llama"] is False


def test_the_stages_of_a_load_are_stated(
    server: ThreadServer, models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, wanted in {"llama": {"read weights", "move to device"}, "torch": {"read weights"}, "echo": set()}.items():
        stages = ask(server, f"/v2/models/{name}/stats", method="GET").body["model_stats"][0]["load_seconds"]
        assert stages.keys() >= {"configuration", "import backend", "start instances"} | wanted
        assert all(seconds >= 0 for seconds in stages.values())
        text = str(ask(server, "/metrics", method="GET").body)
        for stage, seconds in stages.items():
            line = f'headrace_model_load_stage_seconds{{model="{name}",version="1",stage="{stage}"}} '
            (value,) = (row.removeprefix(line) for row in text.splitlines() if row.startswith(line))
            assert float(value) == pytest.approx(seconds)
        shown = run("models", "show", name, "--url", server.url)
        assert shown.returncode == 0, shown.stderr
        assert "Load of version 1" in shown.stdout
        assert all(stage in shown.stdout for stage in stages)
    total = float(re.findall(r'nv_model_load_duration_secs{model="llama",version="1"} (\S+)', text)[0])
    assert (
        0.8 * total
        < sum(ask(server, "/v2/models/llama/stats", method="GET").body["model_stats"][0]["load_seconds"].values())
        <= total * 1.01
    )
    with caplog.at_level(logging.INFO, "headrace.engine.repository"):
        ask(server, "/v2/repository/models/llama/unload", {})
        ask(server, "/v2/repository/models/llama/load", {})
    assert re.search(r"model 'llama' version 1 is ready after \S+ s: .*read weights \S+ s", caplog.text)


def test_a_model_on_demand_sleeps_and_is_evicted(models: Path, tmp_path: Path) -> None:
    sizes = ("--model-control-mode", "on-demand", "--model-sizes-dir", tmp_path / "sizes")
    with serve_in_thread(models, *sizes) as server:
        answer = ask(server, "/v1/models/llama/sleep")
        assert answer.status == 409
        assert "model 'llama' is not loaded, so that it has no memory to give back" in answer.body["error"]
        before = chat(server)
        assert ask(server, "/v1/models/llama/sleep", {"level": 2}).status == 200
        assert chat(server) == before
        ask(server, "/v1/models/llama/sleep", {"level": 2})
        assert ask(server, "/v2/repository/models/llama/unload", {}).status == 200
        assert chat(server) == before


def test_a_sleeping_model_whose_folder_goes_is_unloaded(models: Path, tmp_path: Path) -> None:
    copied = tmp_path / "models"
    shutil.copytree(models / "torch", copied / "torch")
    polling = ("--model-control-mode", "poll", "--repository-poll-secs", "1")
    with serve_in_thread(copied, *polling) as server:
        assert ask(server, "/v1/models/torch/sleep", {"level": 2}).status == 200
        shutil.rmtree(copied / "torch")
        eventually(lambda: ask(server, "/v2/models/torch/ready", method="GET").status != 200)
        assert ask(server, "/v2/models/torch/infer", ROW).status in (404, 503)
        assert ask(server, "/v1/models/torch/wake").status in (404, 503)


@pytest.mark.slow
def test_several_processes_cannot_sleep_and_a_killed_one_leaves_nothing(models: Path, tmp_path: Path) -> None:
    files = {path: path.read_bytes() for path in models.rglob("*") if path.is_file()}
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with serve_process(tmp_path / "first.log", models, env={"TMPDIR": str(scratch)}) as server:
        before = chat(server)
        assert ask(server, "/v1/models/llama/sleep", {"level": 1}).status == 200
        assert ask(server, "/v1/models/torch/sleep", {"level": 2}).status == 200
        held = sorted(path.name for path in scratch.rglob("*"))
        server.process.kill()
        server.process.wait(30)
    assert not [name for name in held if "headrace" in name]
    assert {path: path.read_bytes() for path in models.rglob("*") if path.is_file()} == files
    with serve_process(tmp_path / "second.log", models, "--workers", "2", ready=BOTH_WORKERS_READY) as server:
        assert chat(server) == before
        answer = ask(server, "/v1/models/llama/sleep")
        assert answer.status == 409
        assert "each of the server's processes has a copy of it; start the server without --workers" in str(answer.body)
