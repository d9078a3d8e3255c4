# SPDX-License-Identifier: Apache-2.0
"""Secrets by canary (test 14): a server is given one of each kind, and all that it shows is searched for them.

What platforms show of services that the gateway and `headrace service` start (`ps`, records, manifests, container
inspection, job scripts) is searched by `tests/platforms/driver_contract.py` and `tests/jobs`; see the README beside this.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
import routes_and_rights as rights
from raw_requests import ask
from surfaces import RunningVerb, program, write_echo
from typer.testing import CliRunner

from headrace.api.access.api_keys import create_key
from headrace.core.errors import InvalidArgument
from headrace.fleet.router.settings import BackendAddress
from support.ports import free_port

CANARIES = {
    "the password of Redis": "canary-redis-7d1f",
    "the key of another engine": "canary-engine-91ab",
    "the token of the Hub": "hf_canary-hub-52cd",
    "the key of a store": "canary-store-0e6a",
    "a wrong key": "canary-wrong-key-38bd",
    "a prompt": "canary-prompt-6f20",
    "a value of a tensor": "canary-tensor-a4c4",
}
_PROXIED = """name: "proxied" backend: "openai_proxy"
parameters { key: "url" value { string_value: "http://127.0.0.1:1" } }
parameters { key: "api_key_env" value { string_value: "ENGINE_KEY" } }
parameters { key: "start_seconds" value { string_value: "1" } }
"""
_CONFIGURATION = """
safeguards:
  rate_limit:
    requests_per_minute: 100000
    redis_url: redis://:{redis}@127.0.0.1:1/0
"""


class CanaryServer(NamedTuple):
    running: RunningVerb
    key: str
    answers: dict[str, str]
    """By route."""


@pytest.fixture(scope="module")
def canary_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CanaryServer]:
    """A server with every canary, after every route was asked with a good and with a wrong key."""
    folder = tmp_path_factory.mktemp("canaries")
    models = write_echo(folder / "models")
    (models / "proxied/1").mkdir(parents=True)
    (models / "proxied/config.pbtxt").write_text(_PROXIED)
    configuration = folder / "serve.yaml"
    configuration.write_text(_CONFIGURATION.format(redis=CANARIES["the password of Redis"]))
    key = create_key(folder / "keys.yaml", "root", ["admin"], created=0)
    environment = {
        "ENGINE_KEY": CANARIES["the key of another engine"],
        "HF_TOKEN": CANARIES["the token of the Hub"],
        "AWS_SECRET_ACCESS_KEY": CANARIES["the key of a store"],
    }
    arguments = ("serve", models, "--config", configuration, "--api-keys-file", folder / "keys.yaml")
    port = free_port()
    arguments += (
        "--http-port",
        str(port),
        "--grpc-port",
        "0",
        "--metrics-port",
        "0",
        "--log-verbose",
        "1",
        "--access-log",
        "true",
    )
    arguments += ("--model-control-mode", "explicit", "--load-model", "echo", "--load-model", "proxied")
    ready = rf"listening on 127\.0\.0\.1:({port})\b(?s:.)*model\(s\)"
    with program(folder / "log", *arguments, ready=ready, environment=environment) as running:
        yield CanaryServer(
            running, key, {route: _ask_all(running.port, route, key) for route in rights.by_route(rights.SERVER)}
        )


def _ask_all(port: int, route: str, key: str) -> str:
    method, path = route.split(" ")
    path = path.replace("{}", "echo", 1).replace("{}", "1")
    if path.endswith("/unload") or "modelcontrol/unload" in path:
        path = path.replace("echo", "nothing")
    prompt = CANARIES["a prompt"]
    tensor = {"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": [CANARIES["a value of a tensor"]] * 4}
    document = {
        "model": "proxied",
        "messages": [{"role": "user", "content": prompt}],
        "prompt": prompt,
        "input": prompt,
    }
    body = json.dumps(document | {"inputs": [tensor]}).encode() if method == "POST" else b""
    fields = (f"authorization: Bearer {key}".encode(), f"x-api-key: {key}".encode())
    answer = ask(port, method, f"{path}?api_key={key}&token={CANARIES['the token of the Hub']}", body, fields)
    wrong = CANARIES["a wrong key"]
    refused = ask(port, method, f"{path}?key={wrong}", b"", (f"authorization: Bearer {wrong}".encode(),))
    return repr(answer) + repr(refused)


def secrets_in(text: str, key: str) -> list[str]:
    return [what for what, value in {**CANARIES, "the API key": key}.items() if value in text]


def test_the_log_has_none_of_them(canary_server: CanaryServer) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{canary_server.running.port}") as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ServerMetadata")
        assert call(b"", timeout=30, metadata=(("authorization", f"Bearer {canary_server.key}"),))
    log = canary_server.running.log
    # It has every request, and the levels that tell most.
    assert "/v1/chat/completions" in log and "ServerMetadata" in log and '"debug"' in log.lower()
    assert secrets_in(log, canary_server.key) == []


def test_no_answer_has_one_that_its_sender_did_not_send(canary_server: CanaryServer) -> None:
    """Metrics, status, metadata, configurations, the OpenAPI document, the console: whatever the server tells."""
    sent = {"a prompt", "a value of a tensor"}
    assert len(canary_server.answers) > 80
    for route, text in canary_server.answers.items():
        assert set(secrets_in(text, canary_server.key)) <= sent, route
    assert (
        "nv_inference" in canary_server.answers["GET /metrics"]
        and "status=200" in canary_server.answers["GET /console/api/live"]
    )
    for route in ("GET /metrics", "GET /console/api/live", "GET /api/status", "GET /v2/models/{}/config"):
        assert secrets_in(canary_server.answers[route], canary_server.key) == [], route


def test_ps_shows_none_of_them(canary_server: CanaryServer) -> None:
    lines = canary_server.running.command_lines()
    assert "serve" in lines
    assert secrets_in(lines, canary_server.key) == []


def test_a_configuration_is_shown_without_passwords(tmp_path: Path) -> None:
    from headrace.cli.main import app

    path = tmp_path / "serve.yaml"
    path.write_text(_CONFIGURATION.format(redis=CANARIES["the password of Redis"]))
    for words in (["--origin"], ["--json"], []):
        run = CliRunner().invoke(app, ["config", "show", "--config", str(path), *words])
        assert run.exit_code == 0, run.output
        assert "redis" in run.output
        assert CANARIES["the password of Redis"] not in run.output


@pytest.mark.parametrize("wrong", ["http://ann:s3cr3t@host", "ann:s3cr3t@host:80,wait=1", "ftp://ann:s3cr3t@host/\x00"])
def test_a_password_in_the_address_of_a_backend_is_refused_and_not_repeated(wrong: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        BackendAddress.parse(wrong)
    assert "no password" in refused.value.message and "s3cr3t" not in refused.value.message
