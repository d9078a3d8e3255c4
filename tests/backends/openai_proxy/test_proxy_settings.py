# SPDX-License-Identifier: Apache-2.0
"""What a configuration says of the engine behind a model, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tabular_models import NO_SERVICES, configured

from headrace.backends.contract import ModelFiles
from headrace.backends.openai_proxy.backend import OpenAiProxyBackend
from headrace.backends.openai_proxy.settings import Origin, ProxySettings, parse_origin, read_settings
from headrace.core.dtypes import BYTES
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument

FILES = ModelFiles(Path("/models/test"), 1, Path("/models/test/1"))


def settings(**parameters: str) -> ProxySettings:
    return read_settings(configured("openai_proxy", parameters=parameters), FILES)


def test_defaults() -> None:
    read = settings(url="http://gpu-3:8000")
    assert read == ProxySettings("test", Path("/models/test/1"), origin=Origin("gpu-3", 8000))
    assert (read.health_path, read.health_fallback, read.start_seconds, read.max_in_flight) == (
        "/health",
        "/v1/models",
        600,
        256,
    )


def test_everything_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "abc")
    read = settings(
        command='["python3", "-m", "x", "--port={port}"]',
        env='{"A": "b"}',
        served_model="meta/llama",
        health_path="/ready",
        start_seconds="5",
        stop_seconds="6",
        idle_seconds="7",
        max_in_flight="8",
        api_key_env="KEY",
    )
    assert read.command[0].endswith("/python3") and read.command[0].startswith("/")
    assert read.command[1:] == ("-m", "x", "--port={port}")
    assert (read.environment, read.served_model, read.health_path, read.health_fallback) == (
        {"A": "b"},
        "meta/llama",
        "/ready",
        "",
    )
    assert (read.start_seconds, read.stop_seconds, read.idle_seconds, read.max_in_flight) == (5, 6, 7, 8)
    assert read.api_key == "abc" and "abc" not in repr(read)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({}, "neither a command nor a url"),
        ({"url": "gpu:8000"}, "http://host:port"),
        ({"url": "ftp://gpu"}, "http://host:port"),
        ({"url": "http://gpu:99999999"}, "http://host:port"),
        ({"url": "http://a b"}, "http://host:port"),
        ({"url": "http://gpu\r\nhost: evil"}, "http://host:port"),
        ({"url": "http://user:pw@gpu"}, "api_key_env"),
        ({"url": "http://gpu/?q=1"}, "query"),
        ({"url": "http://gpu", "env": '{"A": "b"}'}, "command"),
        ({"url": "http://gpu", "comand": "[]"}, "comand is not known"),
        ({"url": "http://gpu", "health_path": "health"}, "health_path"),
        ({"url": "http://gpu", "health_path": "/a b"}, "health_path"),
        ({"url": "http://gpu", "start_seconds": "soon"}, "start_seconds"),
        ({"url": "http://gpu", "max_in_flight": "-1"}, "max_in_flight"),
        ({"command": "vllm serve"}, "not JSON"),
        ({"command": "[" * 100_000}, "not JSON"),
        ({"command": "[]"}, "JSON list"),
        ({"command": '["sh", 5]'}, "JSON list"),
        ({"command": '["", "{port}"]'}, "name the program"),
        ({"command": '["sh", "{port}\\u0000"]'}, "NUL"),
        ({"command": json.dumps(["sh", "{port}", *["x"] * 300])}, "too long"),
        ({"command": json.dumps(["sh", "{port}", "x" * 40_000])}, "too long"),
        ({"command": '["sh"]'}, "{port}"),
        ({"command": '["sh", "{port}"]', "env": "[]"}, "JSON object"),
        ({"command": '["sh", "{port}"]', "env": '{"A": 1}'}, "JSON object"),
        ({"command": '["sh", "{port}"]', "env": '{"A=B": "1"}'}, "no environment variable"),
    ],
)
def test_wrong_parameters_are_named(parameters: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        settings(**parameters)
    assert text in caught.value.message


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"command": '["no-such-program", "{port}"]'}, "install it"),
        ({"command": json.dumps([sys.executable, "{port}"]), "api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
        ({"url": "http://gpu", "api_key_env": "BAD_KEY"}, "characters"),
    ],
)
def test_missing_settings_are_reported(monkeypatch: pytest.MonkeyPatch, parameters: dict[str, str], text: str) -> None:
    monkeypatch.setenv("BAD_KEY", "a\nb")
    with pytest.raises(FailedPrecondition) as caught:
        settings(**parameters)
    assert text in caught.value.message


@pytest.mark.parametrize(
    ("url", "origin", "shown"),
    [
        ("http://gpu", Origin("gpu", 80), "gpu:80"),
        ("https://gpu", Origin("gpu", 443, tls=True), "gpu:443"),
        ("http://[::1]:8000/", Origin("::1", 8000), "[::1]:8000"),
        ("http://gpu:1/v1", Origin("gpu", 1), "gpu:1"),
        ("https://gpu/team/v1/", Origin("gpu", 443, tls=True, prefix="/team"), "gpu:443"),
    ],
)
def test_addresses(url: str, origin: Origin, shown: str) -> None:
    assert parse_origin(url) == origin
    assert origin.shown == shown
    assert (origin.context() is not None) is origin.tls


def test_the_model_must_be_one_that_generates() -> None:
    backend = OpenAiProxyBackend()
    tensors = {"text_input": (BYTES, (1,))}, {"text_output": (BYTES, (-1,))}
    url = {"url": "http://gpu"}
    wrong = [
        configured("openai_proxy", *tensors, batch=0, parameters=url),
        configured("openai_proxy", *tensors, batch=4, decoupled=True, parameters=url),
        configured("openai_proxy", tensors[0], tensors[0], batch=0, decoupled=True, parameters=url),
    ]
    for config in wrong:
        with pytest.raises(HeadraceError, match=r"decoupled|text_output"):
            backend.load(config, FILES, NO_SERVICES)
    assert backend.usable_gpus(8) == 0
