# SPDX-License-Identifier: Apache-2.0
"""Twenty services started at once and stopped at once: no process, port, file or row of the database is left of them."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gateway_process import Gateway, gateway
from picture_models import data_url, onnx_classifier, png
from sqlalchemy import create_engine, inspect, text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # quick: test_gateway_program.py, with one or two
COUNT = 20
AT_HOME = ("headrace.sqlite3", "headrace.sqlite3-wal", "headrace.sqlite3-shm", "audit.jsonl")
"""Files that change all the time."""


def rows(running: Gateway) -> dict[str, int]:
    """How many each table has."""
    url = running.database_url.replace("postgresql://", "postgresql+psycopg://")
    engine = create_engine(url or f"sqlite:///{running.data_dir / 'headrace.sqlite3'}")
    try:
        with engine.connect() as connection:
            names = inspect(connection).get_table_names()
            return {
                name: connection.execute(text(f'SELECT count(*) FROM "{name}"')).scalar_one()  # noqa: S608
                for name in names
            }
    finally:
        engine.dispose()


def files(folder: Path) -> set[str]:
    """All below a folder, folders too."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name not in AT_HOME}


def processes(*marks: Path) -> list[int]:
    """That were told one of these folders, or lie in one."""
    results = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                reported = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                reported += str((entry / "cwd").readlink()).encode()
            except OSError:
                continue
            if any(str(mark).encode() in reported for mark in marks):
                results.append(int(entry.name))
    return sorted(results)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """For temporary files of the gateway and its services, so that none is missed."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_nothing_is_left_of_twenty(tmp_path: Path, scratch: Path, version: str) -> None:
    model = onnx_classifier(tmp_path / "model")
    with gateway(tmp_path) as running, ThreadPoolExecutor(COUNT) as threads:
        assert running.process is not None
        key = running.command("users", "add", "alice", "--org", "acme").strip()
        arguments = ("jobs", "register", str(model), "--org", "acme", "--arch", "classification", "--json")
        document = json.loads(running.command(*arguments))
        token = running.login(key, "acme")
        org = f"/api/{version}/orgs/acme"
        base = f"{org}/experiments/{document['experiment_id']}"

        def ask(method: str, path: str, body: Any = None) -> Any:
            got = running.ask(method, path, body, token)
            assert got.status in (200, 201), (path, got.body)
            return got.json

        def start(_: int) -> str:
            path = f"{org}/inference_microservices:start" if version == "v2" else f"{base}/inference_microservice/start"
            return str(ask("POST", path, {"parent_job_id": document["job_id"]})["job_id"])

        def at(job: str, verb: str) -> str:
            v1 = f"{base}/jobs/{job}/inference_microservice/{verb}"
            return f"{org}/inference_microservices/{job}:{verb}" if version == "v2" else v1

        def use(job: str) -> int:
            port = running.until_loaded(at(job, "status"), token)["server_port"]
            assert ask("POST", at(job, "inference"), {"images": [data_url(png())]})["status"] == "completed"
            return int(port)

        def stop(job: str) -> None:
            ask("DELETE" if version == "v2" else "POST", at(job, "stop"))

        # One before all: what is made once and stays (folders, caches) is not what is looked for.
        first = start(0)
        use(first)
        stop(first)
        record = f"{org}/jobs" if version == "v2" else f"{base}/jobs"
        ask("DELETE", f"{record}/{first}")
        before = files(running.data_dir), files(scratch), rows(running)

        jobs = list(threads.map(start, range(COUNT)))
        assert len(set(jobs)) == COUNT
        assert len(running.processes()) == COUNT
        ports = list(threads.map(use, jobs[: COUNT // 2]))
        assert len(set(ports)) == len(ports)
        # The other half is stopped wherever it may be in its start.
        list(threads.map(stop, jobs))

        assert running.processes() == []
        assert processes(running.data_dir, scratch) == [running.process.pid]
        for port in ports:
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(("127.0.0.1", port))
        assert (files(running.data_dir), files(scratch)) == before[:2]
        assert rows(running)["leases"] == before[2]["leases"] == 0
        # The records say that they were there; who deletes those, too, has no row left of them.
        for job in jobs:
            assert ask("GET", f"{record}/{job}")["status"] == "Done"
            ask("DELETE", f"{record}/{job}")
        assert rows(running) == before[2]
