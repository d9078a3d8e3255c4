# SPDX-License-Identifier: Apache-2.0
"""The server of a replica on Ray: its model is found, its process starts, is watched, and ends with the replica."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from local_site import STUB

from headrace.core.errors import FailedPrecondition, NotFound, Unavailable
from headrace.fleet.ray_serve.replica_spec import ReplicaSpec
from headrace.fleet.ray_serve.server_process import ServerProcess, find_model, start_server
from headrace.fleet.ray_serve.translation import read_services
from headrace.fleet.yaml_documents import ParsedFiles, Source
from headrace.platforms.processes import read_stat
from support.async_tests import async_test
from support.waiting import eventually


def spec_of(model: str, path: str = "/mnt/models/stub", **runner: Any) -> ReplicaSpec:
    """A service whose server is the stub of the fleet's tests."""
    storage = {"storageUri": model, "path": path}
    container = {
        "name": "ome-container",
        "image": "example/stub:1",
        "command": ["python3", str(STUB)],
        "args": ["--host=0.0.0.0", "--port=8080", "--text=$(MODEL_PATH)"],
        "ports": [{"name": "http", "containerPort": 8080}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 1, "timeoutSeconds": 30},
    }
    formats = [{"name": "stub", "modelFormat": {"name": "stub"}, "autoSelect": False}]
    documents = [
        {"apiVersion": "ome.io/v1beta1", "kind": kind, "metadata": {"name": name}, "spec": spec}
        for kind, name, spec in (
            ("ClusterBaseModel", "stub", {"modelFormat": {"name": "stub"}, "storage": storage}),
            (
                "ClusterServingRuntime",
                "stub",
                {"supportedModelFormats": formats, "engineConfig": {"runner": {**container, **runner}}},
            ),
            ("InferenceService", "named", {"model": {"name": "stub"}, "runtime": {"name": "stub"}, "engine": {}}),
        )
    ]
    found = read_services(ParsedFiles([Source(document) for document in documents], []))
    assert not found.errors, found.errors
    return found.specs[0]


# The model


def test_a_model_is_used_where_it_is(tmp_path: Path) -> None:
    here = f"local://{tmp_path}"
    assert find_model(spec_of(here), "gpu02") == str(tmp_path)
    assert find_model(spec_of("pvc://models/stub", str(tmp_path)), "gpu02") == str(tmp_path)


@pytest.mark.parametrize("uri", ["local:///nowhere/stub", "pvc://models/stub"])
def test_a_missing_model_is_named_with_the_node(uri: str) -> None:
    with pytest.raises(
        NotFound, match="model stub: /mnt/models/stub is not on node gpu02: put the model's files there"
    ):
        find_model(spec_of(uri), "gpu02")


def test_a_model_from_elsewhere_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path))
    seen: list[Any] = []

    def fetch(place: Any, folder: Path, credentials: Any, **options: Any) -> Path:
        seen.append((place, folder))
        return folder / "stub"

    assert find_model(spec_of("hf://org/stub"), "gpu02", fetch) == str(tmp_path / "models" / "stub")
    assert seen[0][1] == tmp_path / "models"


def test_a_failed_download_names_the_model_and_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path))

    def fetch(*_: Any, **__: Any) -> Path:
        raise NotFound("org/stub is not on the Hub")

    with pytest.raises(NotFound, match="model stub on node gpu02: org/stub is not on the Hub"):
        find_model(spec_of("hf://org/stub"), "gpu02", fetch)


@async_test
async def test_a_program_that_is_not_installed_is_named(tmp_path: Path) -> None:
    spec = spec_of(f"local://{tmp_path}", command=["no-such-program"])
    with pytest.raises(FailedPrecondition, match=r"named cannot start on .*: no-such-program is not on this machine"):
        await start_server(spec)


# The process


def page(server: ServerProcess, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=60) as response:
        return str(response.read().decode())


@pytest.mark.slow
@async_test
async def test_a_server_starts_is_checked_and_stopped(tmp_path: Path) -> None:
    server = await start_server(spec_of(f"local://{tmp_path}"))
    await server.wait_ready()
    assert (await asyncio.to_thread(page, server, "/name")).split()[0] == str(tmp_path)  # in place of /mnt/models/stub
    await server.check()
    await server.stop(30.0)
    assert not server.log_path.parent.exists()
    with pytest.raises(Unavailable, match="has ended"):
        await server.check()


@pytest.mark.slow
@async_test
async def test_a_killed_server_is_noticed(tmp_path: Path) -> None:
    server = await start_server(spec_of(f"local://{tmp_path}"))
    await server.wait_ready()
    os.kill(server.pid, signal.SIGKILL)
    assert "signal 9" in server.end_message(await server.wait())
    with pytest.raises(Unavailable, match=r"has ended \(signal 9: killed\)"):
        await server.check()
    await server.stop(1.0)


@pytest.mark.slow
@async_test
async def test_a_server_that_ends_at_its_start_shows_its_last_lines(tmp_path: Path) -> None:
    failing = ["python3", "-c", "import sys; sys.exit('no such setting')"]
    server = await start_server(spec_of(f"local://{tmp_path}", command=failing, args=[]))
    with pytest.raises(
        FailedPrecondition, match=r"exit code 1\) before it was ready; its last lines:\nno such setting"
    ):
        await server.wait_ready()
    await server.stop(1.0)


@pytest.mark.slow
@async_test
async def test_a_server_that_does_not_start_in_time_is_reported(tmp_path: Path) -> None:
    probe = {"httpGet": {"path": "/never", "port": "http"}, "periodSeconds": 1, "failureThreshold": 1}
    server = await start_server(spec_of(f"local://{tmp_path}", startupProbe=probe))
    with pytest.raises(FailedPrecondition, match="did not become ready in time"):
        await server.wait_ready()
    await server.stop(30.0)


_REPLICA = """
import asyncio, json, sys
from headrace.fleet.ray_serve.replica_spec import ReplicaSpec
from headrace.fleet.ray_serve.server_process import start_server
async def main():
    server = await start_server(ReplicaSpec.from_json(json.load(sys.stdin)))
    await server.wait_ready()
    print(server.pid, flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


@pytest.mark.slow
def test_the_server_ends_when_its_replica_is_killed(tmp_path: Path) -> None:
    import json

    spec = replace(spec_of(f"local://{tmp_path}"), grace_seconds=1.0)
    with subprocess.Popen(
        [sys.executable, "-c", _REPLICA], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(spec.as_json()))
        process.stdin.close()
        server = int(process.stdout.readline())
        process.kill()
        process.wait(60)
        eventually(lambda: (stat := read_stat(server)) is None or not stat.is_alive)
