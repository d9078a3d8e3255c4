# SPDX-License-Identifier: Apache-2.0
"""`headrace serve --workers`: any worker answers for all, even if one dies."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.programs import Program, run
from support.servers import serve_process
from support.tiny_models import CONFIG, make_models
from support.waiting import eventually

REQUEST = json.dumps(
    {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
).encode()
STARTED = re.compile(r"started worker (\d) \(pid (\d+)\)")


@contextmanager
def serve_workers(folder: Path, *words: str | Path, count: int = 2) -> Iterator[Program]:
    """Start a server of several workers in `folder`, and wait until each of them serves."""
    with (
        tempfile.TemporaryDirectory(prefix="hr") as temporary,  # a name that is short enough for sockets in it
        serve_process(folder / "log", *words, "--workers", str(count), env={"TMPDIR": temporary}) as server,
    ):
        eventually(lambda: len(set(re.findall(r'"worker":(\d)', server.log))) == count)
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """Two workers for all tests that leave the model `echo` loaded, and two workers."""
    folder = tmp_path_factory.mktemp("workers")
    models = make_models(folder / "models", echo=CONFIG, spare=CONFIG, changing=CONFIG, leaving=CONFIG)
    options = ("--model-control-mode=explicit", "--load-model=echo", "--load-model=leaving", "--allow-client-shm")
    with serve_workers(folder, models, *options) as running:
        yield running


def ask(server: Program, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """One request on a connection of its own, which the kernel gives to any of the workers."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def infer(server: Program, model: str = "echo") -> int:
    return ask(server, "POST", f"/v2/models/{model}/infer", REQUEST)[0]


def count_in_statistics(server: Program) -> int:
    document: Any = json.loads(ask(server, "GET", "/v2/models/echo/stats")[1])
    return int(document["model_stats"][0]["inference_stats"]["success"]["count"])


def count_in_metrics(server: Program) -> int:
    text = ask(server, "GET", "/metrics")[1].decode()
    return int(re.findall(r'^nv_inference_request_success\{model="echo".*\} (\d+)$', text, re.MULTILINE)[0])


def count_in_status(server: Program) -> int:
    text = ask(server, "GET", "/api/status/echo")[1].decode()
    return int(re.findall(r"model_inference_count: (\d+)", text)[0])


TELLERS = (count_in_statistics, count_in_metrics, count_in_status)


def pid_of(server: Program, index: int) -> int:
    """The process that is worker `index` now."""
    return int([pid for worker, pid in STARTED.findall(server.log) if int(worker) == index][-1])


def kill_worker(server: Program, index: int) -> None:
    """Kill a worker, and wait until another one serves in its place."""
    serving = server.log.count(f'"worker":{index}')
    os.kill(pid_of(server, index), signal.SIGKILL)
    eventually(lambda: server.log.count(f'"worker":{index}') == serving + 1)


def test_any_worker_answers_for_all(server: Program) -> None:
    def status_count() -> int:
        text = ask(server, "GET", "/api/status")[1].decode()
        return int(re.findall(r"status_stats \{\s+success \{\s+count: (\d+)", text)[0])

    for _ in range(2):  # so that there is something to tell
        infer(server)
        ask(server, "GET", "/api/status")
    before = [tell(server) for tell in TELLERS]
    request = status_count()
    assert [infer(server) for _ in range(30)] == [200] * 30
    for _ in range(8):
        assert [tell(server) for tell in TELLERS] == [count + 30 for count in before]
    # Ours before this one, and those of `told_by_status`, whoever answered them.
    assert status_count() == request + 9


class Load:
    """Clients that ask, each time on a new connection, until they are told to stop."""

    def __init__(self, server: Program) -> None:
        self._server = server
        self._stop = threading.Event()
        self.good = 0
        self.wrong: list[object] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(4)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                status = infer(self._server)
            except (OSError, http.client.HTTPException):
                continue  # it was with the worker that was killed
            if status == 200:
                self.good += 1
            else:
                self.wrong.append(status)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(100)


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_no_counter_falls(tmp_path: Path) -> None:
    with serve_workers(tmp_path, make_models(tmp_path / "models", echo=CONFIG)) as server:
        load = Load(server)
        last = dict.fromkeys(TELLERS, 0)

        def lowest_count() -> int:
            for tell in TELLERS:
                try:
                    reported = tell(server)
                except (OSError, http.client.HTTPException):
                    continue
                if reported < last[tell]:
                    raise RuntimeError(f"{tell.__name__}: {reported} after {last[tell]}")
                last[tell] = reported
            return min(last.values())

        try:
            eventually(lambda: lowest_count() > 50)
            killed = pid_of(server, 1)
            os.kill(killed, signal.SIGKILL)
            eventually(lambda: lowest_count() and pid_of(server, 1) != killed)
            eventually(lambda: lowest_count() and server.log.count('"worker":1') == 2)
            before = min(last.values())
            eventually(lambda: lowest_count() > before + 50)
        finally:
            load.stop()
        lowest_count()
        # It is the server's uptime, not that of the worker which came back.
        uptimes = [
            int(re.findall(r"uptime_ns: (\d+)", ask(server, "GET", "/api/status")[1].decode())[0]) for _ in range(6)
        ]
        assert uptimes == sorted(uptimes)
        # The one that came back took no request before it could serve it.
        assert not load.wrong
        for tell in TELLERS:
            assert {tell(server) for _ in range(6)} == {last[tell]}


@pytest.mark.slow
def test_a_killed_supervisor_leaves_nothing_behind(tmp_path: Path) -> None:
    with serve_workers(tmp_path) as server:
        temporary = folder_of(server).parent
        pids = [pid_of(server, index) for index in range(2)]
        server.kill()
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        assert not list(temporary.iterdir())


def folder_of(server: Program) -> Path:
    """The folder that the workers share, by its place in the environment of the server."""
    variables = Path(f"/proc/{server.pid}/environ").read_bytes().decode().split("\0")
    (temporary,) = (variable.removeprefix("TMPDIR=") for variable in variables if variable.startswith("TMPDIR="))
    (folder,) = Path(temporary).glob("headrace-*")
    return folder


def test_models_are_loaded_and_unloaded_in_all_workers(server: Program) -> None:
    assert {infer(server, "spare") for _ in range(12)} == {404}
    assert ask(server, "POST", "/v2/repository/models/spare/load")[0] == 200
    assert {infer(server, "spare") for _ in range(12)} == {200}
    assert ask(server, "POST", "/v2/repository/models/leaving/unload")[0] == 200
    assert {infer(server, "leaving") for _ in range(12)} == {404}
    status, told = ask(server, "POST", "/v2/repository/models/nowhere/load")
    assert status != 200 and b"failed to load 'nowhere'" in told
    # A worker that starts later has what the others have.
    kill_worker(server, 0)
    assert {infer(server, "spare") for _ in range(12)} == {200}
    assert {infer(server, "leaving") for _ in range(12)} == {404}


def test_several_change_models_at_the_same_time(server: Program) -> None:
    statuses: list[int] = []

    def change(index: int) -> None:
        deed = "unload" if index % 2 else "load"
        statuses.append(ask(server, "POST", f"/v2/repository/models/changing/{deed}")[0])

    threads = [threading.Thread(target=change, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert statuses == [200] * 8
    # Whatever came last, it is the same in both.
    assert len({infer(server, "changing") for _ in range(12)}) == 1


def test_a_split_is_known_to_all_workers_and_its_report_is_of_all(server: Program) -> None:
    done = run("ab", "set", "echo", "1=1", "--url", server.url)
    assert done.returncode == 0, done.stderr
    assert [infer(server) for _ in range(20)] == [200] * 20
    for _ in range(8):
        status, text = ask(server, "GET", "/admin/traffic/echo/report")
        assert status == 200 and [version["answered"] for version in json.loads(text)["versions"]] == [20]
    assert run("ab", "clear", "echo", "--url", server.url).returncode == 0
    assert {ask(server, "GET", "/admin/traffic/echo")[0] for _ in range(8)} == {404}


def test_the_console_shows_all_workers(server: Program) -> None:
    before = json.loads(ask(server, "GET", "/console/api/live")[1])["models"]
    watch = json.dumps({"model": "echo", "requests": 24}).encode()
    assert ask(server, "POST", "/console/api/requests", watch)[0] == 200
    assert [infer(server) for _ in range(24)] == [200] * 24
    after = json.loads(ask(server, "GET", "/console/api/live")[1])["models"]
    counts = [next(row["numbers"]["done"] for row in rows if row["name"] == "echo") for rows in (before, after)]
    assert counts[1] == counts[0] + 24
    timelines = json.loads(ask(server, "GET", "/console/api/requests")[1])["requests"]
    assert len({timeline["key"] for timeline in timelines}) == 24


def test_the_workers_folder_is_private(server: Program) -> None:
    assert folder_of(server).stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_the_workers_folder_is_gone_afterwards(tmp_path: Path) -> None:
    with serve_workers(tmp_path, "--allow-grpc=false") as server:
        folder = folder_of(server)
        assert ask(server, "GET", "/metrics")[0] == 200
        assert server.stop() == 0
        assert not list(folder.parent.iterdir())


def test_settings_and_shared_memory_are_known_to_all_workers(server: Program) -> None:
    region = Path(f"/dev/shm/headrace-workers-{os.getpid()}")
    region.write_bytes(bytes(64))

    def settings_of_workers() -> set[tuple[object, ...]]:
        """What is told on a dozen connections."""
        return {
            (
                json.loads(ask(server, "GET", "/v2/logging")[1])["log_verbose_level"],
                json.loads(ask(server, "GET", "/v2/models/echo/trace/setting")[1])["trace_rate"],
                *(item["name"] for item in json.loads(ask(server, "GET", "/v2/systemsharedmemory/status")[1])),
            )
            for _ in range(12)
        }

    try:
        assert ask(server, "POST", "/v2/logging", b'{"log_verbose_level": 0}')[0] == 200
        assert settings_of_workers() == {(0, "1000")}
        assert ask(server, "POST", "/v2/logging", b'{"log_verbose_level": 1}')[0] == 200
        assert ask(server, "POST", "/v2/models/echo/trace/setting", b'{"trace_rate": "7"}')[0] == 200
        register = json.dumps({"key": f"/{region.name}", "offset": 0, "byte_size": 64}).encode()
        assert ask(server, "POST", "/v2/systemsharedmemory/region/r/register", register)[0] == 200
        assert ask(server, "POST", "/v2/systemsharedmemory/region/s/register", register)[0] == 200
        assert ask(server, "POST", "/v2/systemsharedmemory/region/s/unregister")[0] == 200
        assert settings_of_workers() == {(1, "7", "r")}
        status, text = ask(server, "POST", "/v2/logging", b'{"log_verbose_level": -1}')
        assert status == 400 and b"log_verbose_level" in text
        kill_worker(server, 1)
        assert settings_of_workers() == {(1, "7", "r")}
    finally:
        region.unlink()


def test_the_same_over_grpc(server: Program) -> None:
    triton = pytest.importorskip("tritonclient.grpc")
    before = count_in_statistics(server)
    assert [infer(server) for _ in range(20)] == [200] * 20
    for level in range(1, 7):
        # A channel of its own each time, so that it reaches any of the workers.
        options = [("grpc.use_local_subchannel_pool", 1)]
        with triton.InferenceServerClient(server.grpc_url.removeprefix("grpc://"), channel_args=options) as client:
            reported = client.get_inference_statistics("echo").model_stats[0]
            assert reported.inference_stats.success.count == before + 20
            client.update_log_settings({"log_verbose_level": level})
        for _ in range(4):
            assert json.loads(ask(server, "GET", "/v2/logging")[1])["log_verbose_level"] == level
