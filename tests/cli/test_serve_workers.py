# SPDX-License-Identifier: Apache-2.0
"""`headrace serve --workers`: whichever worker is asked answers for all, also when one of them dies."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_programs import CONFIG, LISTENING, PLAIN, Server, make_models, serve

REQUEST = json.dumps(
    {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
).encode()
STARTED = re.compile(r"started worker (\d) \(pid (\d+)\)")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A place for the workers' folder, with a name that is short enough for sockets in it."""
    with tempfile.TemporaryDirectory(prefix="hr") as folder:
        yield Path(folder)


def ask(server: Server, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """One request on a connection of its own, which the kernel gives to any of the workers."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def infer(server: Server, model: str = "echo") -> int:
    return ask(server, "POST", f"/v2/models/{model}/infer", REQUEST)[0]


def told_by_statistics(server: Server) -> int:
    document: Any = json.loads(ask(server, "GET", "/v2/models/echo/stats")[1])
    return int(document["model_stats"][0]["inference_stats"]["success"]["count"])


def told_by_metrics(server: Server) -> int:
    text = ask(server, "GET", "/metrics")[1].decode()
    return int(re.findall(r'^nv_inference_request_success\{model="echo".*\} (\d+)$', text, re.MULTILINE)[0])


def told_by_status(server: Server) -> int:
    text = ask(server, "GET", "/api/status/echo")[1].decode()
    return int(re.findall(r"model_inference_count: (\d+)", text)[0])


TELLERS = (told_by_statistics, told_by_metrics, told_by_status)


def pid_of(server: Server, index: int) -> int:
    """The process that is worker `index` now."""
    return int([pid for worker, pid in STARTED.findall(server.log) if int(worker) == index][-1])


def until(condition: Callable[[], Any], server: Server, seconds: float = 100.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, server.log
        time.sleep(0.02)


def all_ready(server: Server, workers: int) -> Callable[[], bool]:
    return lambda: len(set(re.findall(r'"worker":(\d)', server.log))) == workers


def test_any_worker_answers_for_all(tmp_path: Path) -> None:
    models = make_models(tmp_path / "models", echo=CONFIG)
    with serve(tmp_path / "log", models, "--workers", "3") as server:
        until(all_ready(server, 3), server)
        assert [infer(server) for _ in range(30)] == [200] * 30
        for _ in range(8):
            assert [tell(server) for tell in TELLERS] == [30, 30, 30]
        status = ask(server, "GET", "/api/status")[1].decode()
        # The requests for a status that came before this one, whoever answered them.
        assert re.findall(r"status_stats \{\s+success \{\s+count: (\d+)", status) == ["8"]


class Load:
    """Clients that ask, each time on a new connection, until they are told to stop."""

    def __init__(self, server: Server) -> None:
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


def test_a_killed_worker_comes_back_and_no_counter_falls(tmp_path: Path) -> None:
    models = make_models(tmp_path / "models", echo=CONFIG)
    with serve(tmp_path / "log", models, "--workers", "2") as server:
        until(all_ready(server, 2), server)
        load = Load(server)
        last = dict.fromkeys(TELLERS, 0)

        def look() -> None:
            for tell in TELLERS:
                try:
                    told = tell(server)
                except (OSError, http.client.HTTPException):
                    continue
                assert told >= last[tell], tell
                last[tell] = told

        try:
            until(lambda: look() or min(last.values()) > 50, server)
            killed = pid_of(server, 1)
            os.kill(killed, signal.SIGKILL)
            until(lambda: look() or pid_of(server, 1) != killed, server)
            until(lambda: look() or server.log.count('"worker":1') == 2, server)
            before = min(last.values())
            until(lambda: look() or min(last.values()) > before + 50, server)
        finally:
            load.stop()
        look()
        # It is the server's uptime, not that of the worker which came back.
        uptimes = [
            int(re.findall(r"uptime_ns: (\d+)", ask(server, "GET", "/api/status")[1].decode())[0]) for _ in range(6)
        ]
        assert uptimes == sorted(uptimes)
        # The one that came back took no request before it could serve it.
        assert not load.wrong
        for tell in TELLERS:
            assert {tell(server) for _ in range(6)} == {last[tell]}


def test_a_killed_supervisor_leaves_nothing_behind(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PLAIN, "TMPDIR", str(temporary))
    with pytest.raises(AssertionError), serve(tmp_path / "log", "--workers=2") as server:  # its end is not a good one
        until(all_ready(server, 2), server)
        pids = [pid_of(server, index) for index in range(2)]
        server.process.kill()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), server)
        left = list(temporary.iterdir())
    assert server.process.returncode == -signal.SIGKILL
    assert not left


def test_models_are_loaded_and_unloaded_in_all_workers(tmp_path: Path) -> None:
    models = make_models(tmp_path / "models", echo=CONFIG, spare=CONFIG)
    options = ("--workers=2", "--model-control-mode=explicit", "--load-model=echo")
    with serve(tmp_path / "log", models, *options) as server:
        until(all_ready(server, 2), server)
        assert {infer(server, "spare") for _ in range(12)} == {404}
        assert ask(server, "POST", "/v2/repository/models/spare/load")[0] == 200
        assert {infer(server, "spare") for _ in range(12)} == {200}
        assert ask(server, "POST", "/v2/repository/models/echo/unload")[0] == 200
        assert {infer(server) for _ in range(12)} == {404}
        status, told = ask(server, "POST", "/v2/repository/models/nowhere/load")
        assert status != 200 and b"failed to load 'nowhere'" in told
        # A worker that starts later has what the others have.
        os.kill(pid_of(server, 0), signal.SIGKILL)
        until(lambda: server.log.count('"worker":0') == 2, server)
        assert {infer(server, "spare") for _ in range(12)} == {200}
        assert {infer(server) for _ in range(12)} == {404}


def test_several_change_models_at_the_same_time(tmp_path: Path) -> None:
    models = make_models(tmp_path / "models", echo=CONFIG)
    with serve(tmp_path / "log", models, "--workers=2", "--model-control-mode=explicit") as server:
        until(all_ready(server, 2), server)
        statuses: list[int] = []

        def change(index: int) -> None:
            deed = "unload" if index % 2 else "load"
            statuses.append(ask(server, "POST", f"/v2/repository/models/echo/{deed}")[0])

        threads = [threading.Thread(target=change, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert statuses == [200] * 8
        # Whatever came last, it is the same in both.
        assert len({infer(server) for _ in range(12)}) == 1


def test_the_workers_folder_is_private_and_gone_afterwards(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PLAIN, "TMPDIR", str(temporary))
    with serve(tmp_path / "log", "--workers=2") as server:
        until(all_ready(server, 2), server)
        (folder,) = temporary.glob("headrace-*")
        assert folder.stat().st_mode & 0o777 == 0o700
        assert ask(server, "GET", "/metrics")[0] == 200
    assert not list(temporary.iterdir())


def test_settings_and_shared_memory_are_known_to_all_workers(tmp_path: Path) -> None:
    region = Path(f"/dev/shm/headrace-workers-{os.getpid()}")
    region.write_bytes(bytes(64))
    try:
        with serve(tmp_path / "log", "--workers=2", "--allow-client-shm") as server:
            until(all_ready(server, 2), server)

            def seen() -> set[tuple[object, ...]]:
                """What is told on a dozen connections."""
                return {
                    (
                        json.loads(ask(server, "GET", "/v2/logging")[1])["log_verbose_level"],
                        json.loads(ask(server, "GET", "/v2/models/identity/trace/setting")[1])["trace_rate"],
                        *(each["name"] for each in json.loads(ask(server, "GET", "/v2/systemsharedmemory/status")[1])),
                    )
                    for _ in range(12)
                }

            assert seen() == {(0, "1000")}
            assert ask(server, "POST", "/v2/logging", b'{"log_verbose_level": 1}')[0] == 200
            assert ask(server, "POST", "/v2/models/identity/trace/setting", b'{"trace_rate": "7"}')[0] == 200
            register = json.dumps({"key": f"/{region.name}", "offset": 0, "byte_size": 64}).encode()
            assert ask(server, "POST", "/v2/systemsharedmemory/region/r/register", register)[0] == 200
            assert ask(server, "POST", "/v2/systemsharedmemory/region/s/register", register)[0] == 200
            assert ask(server, "POST", "/v2/systemsharedmemory/region/s/unregister")[0] == 200
            assert seen() == {(1, "7", "r")}
            status, text = ask(server, "POST", "/v2/logging", b'{"log_verbose_level": -1}')
            assert status == 400 and b"log_verbose_level" in text
            os.kill(pid_of(server, 1), signal.SIGKILL)
            until(lambda: server.log.count('"worker":1') == 2, server)
            assert seen() == {(1, "7", "r")}
    finally:
        region.unlink()


def test_the_same_over_grpc(tmp_path: Path) -> None:
    triton = pytest.importorskip("tritonclient.grpc")
    with serve(tmp_path / "log", "--workers=2") as server:
        until(all_ready(server, 2), server)
        assert [infer(server, "identity") for _ in range(20)] == [200] * 20
        port = LISTENING.findall(server.log)[1]
        for level in range(1, 7):
            # A channel of its own each time, so that it reaches any of the workers.
            options = [("grpc.use_local_subchannel_pool", 1)]
            with triton.InferenceServerClient(f"127.0.0.1:{port}", channel_args=options) as client:
                told = client.get_inference_statistics("identity").model_stats[0]
                assert told.inference_stats.success.count == 20
                client.update_log_settings({"log_verbose_level": level})
            for _ in range(4):
                assert json.loads(ask(server, "GET", "/v2/logging")[1])["log_verbose_level"] == level
