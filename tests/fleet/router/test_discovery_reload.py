# SPDX-License-Identifier: Apache-2.0
"""`headrace router` as people run it, with backends in a file, and settings that change while it runs."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc
from router_program import Running, run_router
from routing import ask, routing

from headrace.fleet.router.proxy import with_fixed
from headrace.fleet.router.settings import BackendAddress, RetrySettings, RouterSettings
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.programs.serve.protocols import build_site
from headrace.programs.serve.settings import ServerSettings
from support.engines import builtin_plane
from support.programs import Finished, run
from support.serving import echo_site, serving
from support.waiting import eventually


def _put(path: Path, content: Any) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(content))
    os.replace(beside, path)


def _status(port: int) -> Any:
    return json.loads(ask(port, "GET", "/router/status").body)


async def _headrace() -> Site:
    anywhere = Address.parse("127.0.0.1:0")
    return build_site(await builtin_plane(), ServerSettings(http=anywhere, grpc=anywhere)).site


def test_grpc_and_http_find_a_backend_added_later(tmp_path: Path) -> None:
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

    def talk(router: Running) -> None:
        port = router.port
        assert ask(port, "GET", "/v2/health/ready").status == 503
        _put(backends, [{"url": f"http://127.0.0.1:{one.port}", "weight": 50}])
        eventually(lambda: _status(port)["live"] == 1)
        assert ask(port, "GET", "/v2/health/ready").status == 200
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
            given = np.ones((1, 4), np.float32)
            tensor = tritonclient.grpc.InferInput("INPUT0", [1, 4], "FP32")
            tensor.set_data_from_numpy(given)
            assert (client.infer("identity", [tensor]).as_numpy("OUTPUT0") == given).all()
            _put(backends, [])
            eventually(lambda: not _status(port)["backends"] and not _status(port)["leaving"])
        assert ask(port, "GET", "/v2/health/ready").status == 503

    with serving(_headrace) as one:  # type: ignore[arg-type]
        run_router("--config", str(config), talk=talk)


def test_settings_change_while_it_runs(tmp_path: Path) -> None:
    config = tmp_path / "router.yaml"
    health: dict[str, Any] = {"path": ""}

    def talk(router: Running) -> None:
        port = router.port
        assert _status(port)["policy"] == "round-robin"
        _put(config, {"backends": urls, "policy": "cache_aware", "health": health})
        eventually(lambda: _status(port)["policy"] == "cache_aware" and len(_status(port)["backends"]) == 2)
        for _ in range(4):
            assert ask(port, "POST", "/echo", b'{"prompt": "once upon a time"}').status == 200
        assert sorted(backend["ok"] for backend in _status(port)["backends"]) == [0, 4]
        # What is wrong changes nothing.
        _put(config, {"backends": urls, "policy": "magic", "health": health})
        eventually(lambda: any("magic" in line for line in router.said))
        assert _status(port)["policy"] == "cache_aware"
        # What cannot change is named; the rest counts.
        _put(config, {"backends": urls[1:], "port": 9, "keep_host": False, "health": health})
        line = eventually(lambda: next((line for line in router.said if "need a restart" in line), None))
        assert "keep_host" in line and "address" not in line, "the port is given by an option, which counts for more"
        eventually(lambda: [backend["url"] for backend in _status(port)["backends"]] == urls[1:])
        eventually(lambda: _status(port)["policy"] == "p2c")
        # A signal has them read as well.
        before = sum("Settings reloaded" in line for line in router.said)
        router.send(signal.SIGHUP)
        eventually(lambda: sum("Settings reloaded" in line for line in router.said) > before)
        assert ask(port, "GET", "/hello").body == b"hello"

    with serving(echo_site()) as one, serving(echo_site()) as two:
        urls = [f"http://127.0.0.1:{item.port}" for item in (one, two)]
        _put(config, {"backends": urls[:1], "policy": "round_robin", "health": health})
        finished = run_router("--config", str(config), talk=talk)
        assert finished.returncode == 0, finished.stderr


def test_explain_queries_a_running_router(tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"prompt": "tell me of rivers " * 10}))

    def explain(*more: str) -> Finished:
        return run("router", "explain", "/v1/completions", "--url", f"127.0.0.1:{router.port}", *more)

    with serving(echo_site()) as one, serving(echo_site()) as two:
        with routing(one.port, two.port, policy="cache_aware") as router:
            first = json.loads(explain("-d", f"@{body}", "--json").stdout)
            assert first["why"] == "miss"
            assert all(backend["requests"] == 0 for backend in _status(router.port)["backends"])
            ask(router.port, "POST", "/echo", body.read_bytes())
            explanation = explain("-d", f"@{body}")
            assert (
                explanation.returncode == 0
                and "has seen most of the prompt" in explanation.stdout
                and "180 of 180" in explanation.stdout
            )
            assert "NAME:VALUE" in explain("-H", "nonsense").stderr
            unreadable = explain("-d", "@/nowhere")
            assert unreadable.returncode == 2 and "can be read" in unreadable.stderr
        assert "no router answers" in explain().stderr


def test_what_cannot_change_stays() -> None:
    backends = (BackendAddress.parse("http://a:1"),)
    old = RouterSettings(backends)
    new = RouterSettings(backends, policy="least", max_outstanding=5, retries=RetrySettings(tries=5, inference=True))
    wanted, fixed = with_fixed(old, new)
    assert fixed == ["max_outstanding", "retries.inference"]
    assert (wanted.policy, wanted.max_outstanding, wanted.retries) == ("least", 0, RetrySettings(tries=5))
