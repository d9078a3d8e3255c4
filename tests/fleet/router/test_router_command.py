# SPDX-License-Identifier: Apache-2.0
"""`headrace router` as people run it: options, a file, the table, the drain."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from router_program import Running, run_router
from routing import Answer, ask

from headrace.api.access.api_keys import create_key
from headrace.cli.router_settings import router_settings
from headrace.core.errors import InvalidArgument
from headrace.fleet.router.endpoint_picker import SERVICE as PICKER
from headrace.net.grpc.standard_services import grpc_schema
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.programs.serve.protocols import build_site
from headrace.programs.serve.settings import ServerSettings
from support.engines import builtin_plane
from support.programs import Program, run
from support.serving import EchoHandlers, Serving, echo_site, serving
from support.waiting import eventually


def _drain_while_a_request_waits(
    port: int, server: Serving, handlers: EchoHandlers, terminate: Callable[[], None]
) -> None:
    """A request that has begun is answered after the signal."""
    assert ask(port, "GET", "/hello").body == b"hello"
    answers: list[Answer] = []
    waiting = threading.Thread(target=lambda: answers.append(ask(port, "POST", "/hold", b"x")))
    waiting.start()
    eventually(lambda: handlers.held)
    terminate()
    time.sleep(0.1)
    server.call(lambda: handlers.echo(handlers.held[0]))
    waiting.join(60)
    assert answers[0].body == b"x"


def test_it_routes_and_drains_on_sigterm() -> None:
    handlers = EchoHandlers()
    with serving(echo_site(handlers=handlers)) as server:

        def talk(router: Running) -> None:
            _drain_while_a_request_waits(router.port, server, handlers, lambda: router.send(signal.SIGTERM))

        options = ("--backend", f"http://127.0.0.1:{server.port}", "--policy", "least", "--health-path", "")
        finished = run_router(*options, talk=talk)
        assert finished.returncode == 0, finished.stderr
        assert re.search(r"routing http://127\.0\.0\.1:\d+ by least to\n", finished.stdout)


def test_it_shares_picks_and_predicts(tmp_path: Path) -> None:
    """`--keys-file`, `--epp` and `--policy predicted_latency`, all at once."""
    keys = tmp_path / "keys.yaml"
    key = create_key(keys, "alice", ["infer"], created=0, tenant={"share": 2})
    check = grpc_schema().message("grpc.health.v1.HealthCheckRequest")(service=PICKER).SerializeToString()
    with serving(echo_site()) as server:

        def talk(router: Running) -> None:
            assert ask(router.port, "POST", "/echo", b"x" * 40, {"x-api-key": key}).body == b"x" * 40
            with grpc.insecure_channel(f"127.0.0.1:{router.port}") as channel:
                assert channel.unary_unary("/grpc.health.v1.Health/Check")(check, timeout=30) == b"\x08\x01"
            status = json.loads(ask(router.port, "GET", "/router/status").body)
            assert [(tenant["name"], tenant["share"], tenant["prompt_tokens"]) for tenant in status["tenants"]] == [
                ("alice", 2.0, 10)
            ]
            assert status["policy"] == "predicted_latency"

        options = (
            "--backend",
            f"http://127.0.0.1:{server.port}",
            "--health-path",
            "",
            "--epp",
            "--max-outstanding",
            "4",
        )
        finished = run_router(*options, "--keys-file", str(keys), "--policy", "predicted_latency", talk=talk)
        assert finished.returncode == 0, finished.stderr


@pytest.mark.slow
def test_the_process_drains_on_sigterm(tmp_path: Path) -> None:
    handlers = EchoHandlers()
    with serving(echo_site(handlers=handlers)) as server:
        options = ("--backend", f"http://127.0.0.1:{server.port}", "--policy", "least", "--health-path", "")
        with Program("router", "--port", "0", *options, log=tmp_path / "log", ready="routing http") as process:
            _drain_while_a_request_waits(process.port, server, handlers, lambda: process.send(signal.SIGTERM))
            assert process.wait() == 0, process.log


async def _headrace() -> Site:
    anywhere = Address.parse("127.0.0.1:0")
    return build_site(await builtin_plane(), ServerSettings(http=anywhere, grpc=anywhere)).site


def test_http_and_grpc_on_one_port_before_real_servers() -> None:
    def talk(router: Running) -> None:
        http = tritonclient.http.InferenceServerClient(f"127.0.0.1:{router.port}")
        grpc = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{router.port}")
        with http, grpc:
            for kind, client in ((tritonclient.http, http), (tritonclient.grpc, grpc)):
                for columns in (4, 200_000):
                    given = np.full((1, columns), 2, np.float32)
                    tensor = kind.InferInput("INPUT0", list(given.shape), "FP32")
                    tensor.set_data_from_numpy(given)
                    answer = client.infer("identity", [tensor]).as_numpy("OUTPUT0")
                    assert np.array_equal(answer, given)
        status = json.loads(ask(router.port, "GET", "/router/status").body)
        assert [backend["ok"] for backend in status["backends"]] == [2, 2]

    with serving(_headrace) as one, serving(_headrace) as two:  # type: ignore[arg-type]
        backends = [f"--backend=http://127.0.0.1:{server.port}" for server in (one, two)]
        finished = run_router(*backends, "--policy", "round-robin", "--health-path", "", talk=talk)
        assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "needs a backend"),
        (("--backend", "gopher://x"), "only http and https"),
        (("--backend", "http://a:1", "--keys-file", "/nowhere/keys.yaml"), "fairness needs max_outstanding"),
        (
            ("--backend", "http://a:1", "--keys-file", "/nowhere/keys.yaml", "--max-outstanding", "4"),
            "/nowhere/keys.yaml does not exist: create it with",
        ),
        (("--backend", "http://a:1", "--epp", "--hedge-after", "1"), "cannot be combined with hedging"),
        (("--backend", "http://a:1", "--backend", "http://a:1"), "named twice"),
        (("--backend", "http://a:1", "--policy", "best"), "round-robin"),
        (("--backend", "http://a:1", "--health-path", "no-slash"), "starts with /"),
        (("--backend", "http://a:1", "--config", "/nowhere/router.yaml"), "No such file"),
        (("--backend", "http://a:1", "--tls-key", "k.pem"), "both"),
        (("--backend", "http://a:1", "--connect-timeout", "inf"), "is a number"),
    ],
)
def test_wrong_options_are_reported_in_a_sentence(options: tuple[str, ...], says: str) -> None:
    done = run("router", *options)
    assert done.returncode != 0 and says in done.stderr and "Traceback" not in done.stderr


def test_a_file_and_options(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(
        "backends:\n  - http://a:8000,weight=2\n  - http://b:8000\npolicy: weighted\nport: 9000\n"
        "health:\n  path: /healthz\n  interval_seconds: 5\nretries:\n  inference: true\n  tries: 2\n"
        "timeouts: {response_seconds: 10}\nkeep_host: false\n"
    )
    settings = router_settings({"port": 9001, "health.rise": 4}, str(path))
    router = settings.router
    assert (settings.address.port, settings.address.host) == (9001, "127.0.0.1")
    assert [backend.weight for backend in router.backends] == [2, 1]
    assert (router.policy, router.keep_host) == ("weighted", False)
    assert (router.health.path, router.health.interval_seconds, router.health.rise) == ("/healthz", 5, 4)
    assert (router.retries.inference, router.retries.tries, router.timeouts.response_seconds) == (True, 2, 10)
    assert router.timeouts.connect_seconds == 2.0
    only = router_settings({"backends": ["http://c:1"]}, str(path))
    assert [backend.url for backend in only.router.backends] == ["http://c:1"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("policy: p2c\ncolour: red\n", r"router.yaml:2: there is no setting 'colour'; there are .*backends"),
        ("health:\n  pth: /x\n", r"router.yaml:2: there is no setting 'health.pth'; there are .*path"),
        ("port: eighty\n", "router.yaml:1: port is a whole number"),
        ("port: true\n", "port is a whole number"),
        ("health:\n  rise: -1\n", "rise is a whole number"),
        ("retries:\n  budget: .nan\n", "budget is a number"),
        ("backends: http://a:1\n", "router.yaml:1: backends is a list"),
        ("policy: a\npolicy: b\n", "router.yaml:2: policy is set twice"),
        ("- a\n", "router.yaml:1: names and values"),
        ("policy: [\n", "router.yaml:2: this is not YAML"),
        ("policy: !!python/object:os.system {}\n", "policy is a string"),
    ],
)
def test_mistakes_in_the_file_are_reported_with_their_line(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=says):
        router_settings({}, str(path))
