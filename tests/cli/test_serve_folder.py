# SPDX-License-Identifier: Apache-2.0
"""`headrace serve MODELS`, `headrace models ...` over a real folder."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.programs import run, run_process
from support.servers import ThreadServer, serve_in_thread
from support.tiny_models import BROKEN, CONFIG, make_models
from support.waiting import eventually

REQUEST = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}


def infer(server: ThreadServer, model: str) -> None:
    body = json.dumps(REQUEST).encode()
    with urllib.request.urlopen(f"{server.url}/v2/models/{model}/infer", body, timeout=30) as answer:
        assert json.load(answer)["outputs"][0]["data"] == [1, 2, 3, 4]


def version_of(server: ThreadServer, model: str) -> str:
    rows = json.loads(run("models", "list", "--url", server.url, "--json").stdout)
    return max(str(row["version"]) for row in rows if row["name"] == model)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadServer]:
    folder = tmp_path_factory.mktemp("served")
    make_models(folder / "models", echo=CONFIG, broken=BROKEN, spare=CONFIG, never=CONFIG)
    options = ("--model-control-mode=explicit", "--load-model=echo", "--load-model=broken")
    with serve_in_thread(folder / "models", *options) as running:
        yield running


def test_list(server: ThreadServer) -> None:
    infer(server, "echo")
    done = run("models", "list", "--url", server.url)
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert lines["MODEL"].split()[:4] == ["MODEL", "VERSION", "STATE", "REQUESTS"]
    assert "UNAVAILABLE" in lines["broken"] and "broken/config.pbtxt:3: input: 'dimms'" in lines["broken"]
    assert lines["echo"].split()[1:3] == ["1", "READY"] and int(lines["echo"].split()[3]) >= 1
    assert "not loaded" in lines["never"]


def test_list_as_json(server: ThreadServer) -> None:
    infer(server, "echo")
    rows = {row["name"]: row for row in json.loads(run("models", "list", "--url", server.url, "--json").stdout)}
    assert rows["echo"]["executions"] >= 1 and rows["echo"]["average_batch"] == 1
    assert rows["broken"]["requests"] is None and "dimms" in rows["broken"]["reason"]


def test_show_explains_the_batches(server: ThreadServer) -> None:
    infer(server, "echo")
    done = run("models", "show", "echo", "--url", server.url)
    assert done.returncode == 0, done.stderr
    assert "[-1, 4]" in done.stdout and "A batch never waits for more requests." in done.stdout
    assert "100 %" in done.stdout and "max_queue_delay_microseconds makes batches wait" in done.stdout
    seen = json.loads(run("models", "show", "echo", "--version", "1", "--url", server.url, "--json").stdout)
    assert seen["config"]["max_batch_size"] == 8
    assert seen["stats"][0]["batching"]["recent"][-1]["rows"] == 1


def test_show_a_model_that_does_not_serve(server: ThreadServer) -> None:
    done = run("models", "show", "broken", "--url", server.url)
    assert done.returncode == 1 and "did you mean 'dims'" in done.stdout
    done = run("models", "show", "nowhere", "--url", server.url)
    assert done.returncode == 1 and "'nowhere' is not found" in done.stderr


def test_load_and_unload(server: ThreadServer) -> None:
    done = run("models", "load", "spare", "--url", server.url)
    assert (done.returncode, done.stdout) == (0, "spare: loaded\n"), done.stderr
    infer(server, "spare")
    done = run("models", "unload", "spare", "--url", server.url, "--json")
    assert json.loads(done.stdout) == {"name": "spare", "done": "unload"}
    assert run("models", "show", "spare", "--url", server.url).returncode == 1
    done = run("models", "load", "broken", "--url", server.url)
    assert done.returncode == 1 and "failed to load 'broken', broken/config.pbtxt:3" in done.stderr


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://127.0.0.1:1", "no server answers at http://127.0.0.1:1"),
        ("https://127.0.0.1:1", "only http://"),
        ("http://", "is not a server URL"),
        ("http://127.0.0.1:port", "port must be a number"),
    ],
)
def test_no_server(url: str, told: str) -> None:
    done = run("models", "list", "--url", url)
    assert done.returncode == 2 and told in done.stderr and not done.stdout


def test_a_version_is_added_while_the_server_runs(tmp_path: Path) -> None:
    models = make_models(tmp_path / "models", echo=CONFIG)
    with serve_in_thread(models, "--repository-poll-secs", "0.05") as server:
        (models / "echo" / "2").mkdir()
        eventually(lambda: version_of(server, "echo") == "2")
        infer(server, "echo")
        done = run("models", "load", "echo", "--url", server.url)
        assert done.returncode == 1 and "not allowed if polling is enabled: restart the server" in done.stderr
        assert "try: headrace serve MODELS --model-control-mode explicit" in done.stderr


def test_exit_on_error(tmp_path: Path) -> None:
    models = make_models(tmp_path, broken=BROKEN)
    done = run("serve", models, "--exit-on-error=true", "--http-port", "0", "--grpc-port", "0")
    assert done.returncode == 2 and "1 of 1 models failed to load" in done.stderr


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    done = run_process("serve", tmp_path / "none", "--http-port", "0", "--grpc-port", "0")
    assert done.returncode == 2 and "does not exist" in done.stderr
