# SPDX-License-Identifier: Apache-2.0
"""`headrace router` as people run it, with backends in a file, and settings that change while it runs."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import tritonclient.grpc
from support.engines import builtin_plane
from routing import ask
from support.serving import echo_site, serving

from headrace.apps.protocols import build_site
from headrace.apps.settings import ServerSettings
from headrace.router.proxy import with_fixed
from headrace.router.settings import BackendAddress, RetrySettings, RouterSettings
from headrace.wire.site import Site
from headrace.wire.sockets import Address

_PROGRAM = "from headrace.cli.router_explain import router_group; router_group()"


@contextmanager
def _router(*options: str) -> Iterator[tuple[subprocess.Popen[bytes], int, list[bytes]]]:
    command = [sys.executable, "-c", _PROGRAM, "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    said: list[bytes] = []
    errors = process.stderr
    reading = threading.Thread(target=lambda: said.extend(iter(errors.readline, b"")), daemon=True)
    reading.start()
    try:
        text = b""
        while not (found := re.search(rb"routing http://127\.0\.0\.1:(\d+) by", text)):
            ready, _, _ = select.select([process.stdout], [], [], 100)
            piece = os.read(process.stdout.fileno(), 65536) if ready else b""
            assert piece, (text, said)
            text += piece
        yield process, int(found[1]), said
    finally:
        process.kill()
        process.wait(100)
        reading.join(30)
        process.stdout.close()
        process.stderr.close()


def _put(path: Path, content: Any) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(content))
    os.replace(beside, path)


def _until(right: Callable[[], Any]) -> None:
    end = monotonic() + 30
    while not right():
        assert monotonic() < end, "it did not come to that"
        threading.Event().wait(0.02)


def _status(port: int) -> Any:
    return json.loads(ask(port, "GET", "/router/status").body)


async def _headrace() -> Site:
    anywhere = Address.parse("127.0.0.1:0")
    return build_site(await builtin_plane(), ServerSettings(http=anywhere, grpc=anywhere)).site


def test_grpc_and_http_find_a_backend_that_came_later(tmp_path: Path) -> None:
    backends, config = tmp_path / "backends.json", tmp_path / "router.json"
    _put(backends, [])
    _put(
        config,
        {
            "host": "127.0.0.1",
            "policy": "weighted",
            "health": {"path": ""},
            "discovery": {"file": str(backends), "interval_seconds": 0.05},
        },
    )
    with serving(_headrace) as one, _router("--config", str(config)) as (_, port, _said):  # type: ignore[arg-type]
        assert ask(port, "GET", "/v2/health/ready").status == 503
        _put(backends, [{"url": f"http://127.0.0.1:{one.port}", "weight": 50}])
        _until(lambda: _status(port)["live"] == 1)
        assert ask(port, "GET", "/v2/health/ready").status == 200
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
            given = np.ones((1, 4), np.float32)
            tensor = tritonclient.grpc.InferInput("INPUT0", [1, 4], "FP32")
            tensor.set_data_from_numpy(given)
            assert (client.infer("identity", [tensor]).as_numpy("OUTPUT0") == given).all()
            _put(backends, [])
            _until(lambda: not _status(port)["backends"] and not _status(port)["leaving"])
        assert ask(port, "GET", "/v2/health/ready").status == 503


def test_settings_change_while_it_runs(tmp_path: Path) -> None:
    config = tmp_path / "router.yaml"
    with serving(echo_site()) as one, serving(echo_site()) as two:
        urls = [f"http://127.0.0.1:{each.port}" for each in (one, two)]
        health: dict[str, Any] = {"path": ""}
        _put(config, {"backends": urls[:1], "policy": "round_robin", "health": health})
        with _router("--config", str(config)) as (process, port, said):
            assert _status(port)["policy"] == "round-robin"
            _put(config, {"backends": urls, "policy": "cache_aware", "health": health})
            _until(lambda: _status(port)["policy"] == "cache_aware" and len(_status(port)["backends"]) == 2)
            for _ in range(4):
                assert ask(port, "POST", "/echo", b'{"prompt": "once upon a time"}').status == 200
            assert sorted(each["ok"] for each in _status(port)["backends"]) == [0, 4]
            # What is wrong changes nothing.
            _put(config, {"backends": urls, "policy": "magic", "health": health})
            _until(lambda: any(b"magic" in line for line in said))
            assert _status(port)["policy"] == "cache_aware"
            # What cannot change is named; the rest counts.
            _put(config, {"backends": urls[1:], "port": 9, "keep_host": False, "health": health})
            _until(lambda: any(b"need a new start" in line for line in said))
            line = next(line for line in said if b"need a new start" in line)
            assert b"keep_host" in line and b"address" not in line, (
                "the port is given by an option, which counts for more"
            )
            _until(lambda: [each["url"] for each in _status(port)["backends"]] == urls[1:])
            _until(lambda: _status(port)["policy"] == "p2c")
            # A signal has them read as well.
            before = sum(b"read anew" in line for line in said)
            process.send_signal(signal.SIGHUP)
            _until(lambda: sum(b"read anew" in line for line in said) > before)
            assert ask(port, "GET", "/hello").body == b"hello"
            process.send_signal(signal.SIGTERM)
            assert process.wait(100) == 0


def test_explain_asks_a_running_router(tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"prompt": "tell me of rivers " * 10}))
    with serving(echo_site()) as one, serving(echo_site()) as two:
        options = [f"--backend=http://127.0.0.1:{each.port}" for each in (one, two)]
        with _router(*options, "--policy", "cache_aware", "--health-path", "") as (_, port, _said):
            command = [sys.executable, "-c", _PROGRAM, "explain", "/v1/completions", "--url", f"127.0.0.1:{port}"]

            def explain(*more: str) -> str:
                done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=200, check=False)
                return f"{done.returncode} {done.stdout}{done.stderr}"

            first = json.loads(explain("-d", f"@{body}", "--json").partition(" ")[2])
            assert first["why"] == "miss"
            assert all(each["requests"] == 0 for each in _status(port)["backends"])
            ask(port, "POST", "/echo", body.read_bytes())
            text = explain("-d", f"@{body}")
            assert text.startswith("0 ") and "has seen most of the prompt" in text and "180 of 180" in text
            assert "NAME:VALUE" in explain("-H", "nonsense")
            assert explain("-d", "@/nowhere").startswith("2 ") or "can be read" in explain("-d", "@/nowhere")
        assert "no router answers" in explain()


def test_what_cannot_change_stays() -> None:
    backends = (BackendAddress.parse("http://a:1"),)
    old = RouterSettings(backends)
    new = RouterSettings(backends, policy="least", max_outstanding=5, retries=RetrySettings(tries=5, inference=True))
    wanted, fixed = with_fixed(old, new)
    assert fixed == ["max_outstanding", "retries.inference"]
    assert (wanted.policy, wanted.max_outstanding, wanted.retries) == ("least", 0, RetrySettings(tries=5))
