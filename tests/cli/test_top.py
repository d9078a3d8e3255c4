# SPDX-License-Identifier: Apache-2.0
"""`headrace top`: statistics of a real server and router between two polls, as a table, as JSON and on a terminal."""

from __future__ import annotations

import fcntl
import http.server
import json
import os
import pty
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.client import ServerClient
from headrace.cli.top_view import Row, Snapshot, View, open_poller, quantile, read_metrics, server_view
from headrace.core.errors import HeadraceError
from support.ports import free_port
from support.programs import HEADRACE, Program, run
from support.servers import ThreadServer, serve_in_thread, serve_process
from support.tiny_models import BROKEN, CACHED, CONFIG, make_models


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadServer]:
    models = make_models(tmp_path_factory.mktemp("top") / "models", one=CONFIG, cached=CACHED, broken=BROKEN)
    with serve_in_thread(models, "--strict-readiness=false") as made:
        yield made


def infer(url: str, model: str, rows: int = 1) -> None:
    inputs = [{"name": "INPUT0", "datatype": "FP32", "shape": [rows, 4], "data": [0.5] * 4 * rows}]
    ServerClient(url).post(f"/v2/models/{model}/infer", {"inputs": inputs})


def row_of(view: View, name: str) -> Row:
    (row,) = [row for row in view.rows if row.name == name]
    return row


def test_rates_between_two_samples(server: ThreadServer) -> None:
    poller = open_poller(server.url)
    infer(server.url, "one")
    before = poller.poll()
    for rows in (1, 2, 3, 6):
        infer(server.url, "one", rows)
    view = poller.view(before, poller.poll())
    one = row_of(view, "one")
    assert (view.kind, view.rows[0], one.version, one.state) == ("server", one, "1", "READY")
    assert round(one.requests_per_s * view.seconds, 6) == 4 and one.failures_per_s == one.failures == 0
    assert one.batch == 3.0 and one.queue == 0 and one.cache_hits is None
    assert one.p50_ms is not None and one.p99_ms is not None and 0 < one.p50_ms <= one.p99_ms
    assert view.machine["server_bytes"] > 1e6 and view.machine["memory_total_bytes"] > view.machine["memory_used_bytes"]
    broken = row_of(view, "broken")
    assert broken.state == "UNAVAILABLE" and "dimms" in broken.reason and broken.p50_ms is None


def test_hits_of_the_cache(server: ThreadServer) -> None:
    poller = open_poller(server.url)
    before = poller.poll()
    for _ in range(12):
        infer(server.url, "cached")
    assert row_of(poller.view(before, poller.poll()), "cached").cache_hits == pytest.approx(11 / 12)


@pytest.mark.slow
def test_rates_between_two_samples_of_two_workers(tmp_path: Path) -> None:
    """One of them has the requests while the other may be asked, and each has a cache of its own."""
    models = make_models(tmp_path / "models", cached=CACHED)
    with serve_process(tmp_path / "log", models, "--workers", "2") as server:
        poller = open_poller(server.url)
        before = poller.poll()
        for _ in range(12):
            infer(server.url, "cached")
        view = poller.view(before, poller.poll())
    cached = row_of(view, "cached")
    assert round(cached.requests_per_s * view.seconds, 6) == 12
    assert cached.cache_hits is not None and 10 / 12 <= cached.cache_hits < 1


def test_one_table(server: ThreadServer) -> None:
    done = run("top", server.url, "--once", "--interval", "0.1")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0].startswith(f"{server.url}   0.0 requests/s")
    assert "machine CPU" in lines[1] or "memory" in lines[1]
    head = next(line for line in lines if line.startswith("MODEL"))
    words = "MODEL VER STATE REQ/s FAIL/s FAILED P50 ms P99 ms QUEUE QUEUE ms BATCH HITS WHY"
    assert head.split() == words.split()
    states = {line.split()[0]: line.split()[2] for line in lines[lines.index(head) + 1 :]}
    assert states == {"one": "READY", "cached": "READY", "broken": "UNAVAILABLE"}


def test_json(server: ThreadServer) -> None:
    done = run("top", "--url", server.url, "--once", "--interval", "0.1", "--json")
    document = json.loads(done.stdout)
    assert document["kind"] == "server" and document["seconds"] > 0
    assert {row["name"] for row in document["rows"]} == {"one", "cached", "broken"}


def test_server_unreachable() -> None:
    done = run("top", f"http://127.0.0.1:{free_port()}", "--once")
    assert done.returncode == 2 and done.stderr.startswith("error: no server answers at ")


def test_a_server_without_metrics() -> None:
    with serve_in_thread("--allow-metrics=false") as silent:
        done = run("top", silent.url, "--once")
    assert done.returncode == 2 and "has no /metrics" in done.stderr


def test_a_router(server: ThreadServer, tmp_path: Path) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    port = free_port()
    arguments = ("router", "--backend", server.url, "--backend", gone, "--port", str(port))
    with Program(*arguments, log=tmp_path / "log", ready="BACKEND"):
        url = f"http://127.0.0.1:{port}"
        poller = open_poller(url)
        before = poller.poll()
        for _ in range(5):
            infer(url, "one")
        view = poller.view(before, poller.poll())
        done = run("top", url, "--once", "--interval", "0.1")
    up, down = view.rows
    assert (view.kind, up.name, up.state, down.name) == ("router", server.url, "up", gone)
    assert round(up.requests_per_s * view.seconds, 6) == 5 and up.p99_ms is not None and down.p99_ms is None
    assert "by p2c" in done.stdout and f"\n{server.url}  up " in done.stdout


class Screen:
    """A program on a terminal of its own."""

    def __init__(self, *words: str | Path, columns: int) -> None:
        self._terminal, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        environ = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            # Who runs the tests in the background of a shell has SIGINT ignored, and all below it with it.
            ["env", "--default-signal=INT", *words],
            env=environ | {"TERM": "xterm"},
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
        )
        os.close(inner)

    def read_until(self, text: str) -> str:
        """What was shown up to a text; the test's own time-out is the limit."""
        shown = ""
        while text not in shown:
            try:
                shown += os.read(self._terminal, 65536).decode(errors="replace")
            except OSError:  # it has ended
                raise AssertionError(f"{text!r} was not shown: {shown[-2000:]}") from None
        return shown

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)


def test_on_a_terminal(tmp_path: Path) -> None:
    """It follows a server, survives its end, and gives the terminal back."""
    with ExitStack() as closing:
        with serve_in_thread(make_models(tmp_path / "models", narrow=CONFIG)) as made:
            screen = Screen(HEADRACE, "top", made.url, "--interval", "0.1", columns=80)
            closing.callback(screen.close)
            shown = screen.read_until("narrow")
            assert "\x1b[?1049h" in shown and "P99 ms" in shown and "QUEUE ms" not in shown
            infer(made.url, "narrow")
            screen.read_until("READY")
        screen.read_until("retrying")
        screen.process.send_signal(signal.SIGINT)
        screen.read_until("\x1b[?1049l")
        assert screen.process.wait(100) == 0


# Without a server

TEXT = """# HELP nv_inference_request_success x
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="a \\"b\\" \\\\ c",version="1"} %d
nv_inference_request_failure{model="a \\"b\\" \\\\ c",version="1",reason="BACKEND"} %d
nv_inference_request_failure{model="a \\"b\\" \\\\ c",version="1",reason="REJECTED"} 1
nv_gpu_utilization{gpu_uuid="GPU-1"} 0.5
nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"} 1024
python_gc_collections_total{generation="0"} 12
this is no sample
nv_broken{model="x"} many
"""


def snapshot(at: float, requests: int, failures: int) -> Snapshot:
    return Snapshot(at, read_metrics(TEXT % (requests, failures)))


def test_rates_failures_and_names_with_quotes() -> None:
    view = server_view("u", snapshot(10, 100, 5), snapshot(12, 130, 9))
    (row,) = view.rows
    assert row.name == 'a "b" \\ c' and (row.requests_per_s, row.failures_per_s, row.failures) == (15, 2, 10)
    (gpu,) = view.gpus
    assert (gpu.uuid, gpu.utilisation, gpu.used_bytes, gpu.total_bytes) == ("GPU-1", 0.5, 1024, None)


def test_a_server_that_restarted() -> None:
    (row,) = server_view("u", snapshot(10, 100, 5), snapshot(11, 7, 0)).rows
    assert (row.requests_per_s, row.failures_per_s) == (7, 0)


def test_two_samples_at_the_same_moment() -> None:
    (row,) = server_view("u", snapshot(10, 1, 0), snapshot(10, 9, 0)).rows
    assert row.requests_per_s == 0


INF = float("inf")


@pytest.mark.parametrize(
    ("share", "counts", "value"),
    [
        (0.5, {}, None),
        (0.5, {10.0: 0, INF: 0}, None),
        (0.5, {10.0: 4, INF: 4}, 5.0),
        (0.5, {10.0: 0, 20.0: 10, INF: 10}, 15.0),
        (0.99, {10.0: 98, 20.0: 100, INF: 100}, 15.0),
        (0.99, {10.0: 1, INF: 100}, 10.0),
    ],
)
def test_quantiles(share: float, counts: dict[float, float], value: float | None) -> None:
    assert quantile(share, counts) == value


def test_something_else_that_answers() -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "5")
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *_: Any) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as other:
        thread = threading.Thread(target=other.serve_forever, args=(0.01,))
        thread.start()
        try:
            with pytest.raises(HeadraceError, match="is it a Headrace server"):
                open_poller(f"http://127.0.0.1:{other.server_port}").poll()
        finally:
            other.shutdown()
            thread.join()
