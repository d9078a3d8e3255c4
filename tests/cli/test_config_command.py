# SPDX-License-Identifier: Apache-2.0
"""`headrace config` shows and checks a configuration; `headrace serve --config` uses it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.config import config
from headrace.cli.main import app
from headrace.core.errors import InvalidArgument
from headrace.programs.serve import server
from headrace.programs.serve.server import ServerSettings

FILE = """server:
  port: 8080
  workers: 4
performance:
  inference_timeout_s: 3
safeguards:
  max_request_size_mb: 10
  rate_limit: {requests_per_minute: 7}
cache: {ttl_s: 9, size_mb: 1}
logging: {access: true}
options: {http-address: 0.0.0.0}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "inference.yaml"
    path.write_text(FILE)
    return path


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """As wide as it needs; nothing of whoever runs the tests."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("INFERENCE_CONFIG", raising=False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServerSettings]:
    settings: list[ServerSettings] = []

    def run_server(given: ServerSettings) -> int:
        settings.append(given)
        return 0

    monkeypatch.setattr(server, "run_server", run_server)
    monkeypatch.setattr("headrace.cli.progress.configure_logging", lambda *_: None)
    return settings


def call(*arguments: str | Path, **environment: str) -> Any:
    return CliRunner().invoke(config, [str(argument) for argument in arguments], env=environment)


def rows(output: str) -> dict[str, list[str]]:
    return {cells[0]: cells[1:] for line in output.splitlines() if (cells := line.split(maxsplit=2))}


def test_every_value_and_its_source(file: Path) -> None:
    result = call("show", "--config", file, "--origin", "--http-port", "9000", INFERENCE_WORKERS="2")
    assert result.exit_code == 0, result.output
    shown = rows(result.output)
    assert shown["server.port"] == ["9000", "flag --http-port"]
    assert shown["server.workers"] == ["2", "env INFERENCE_WORKERS"]
    assert shown["safeguards.max_request_size_mb"] == ["10", f"{file}:7"]
    assert shown["server.grpc_port"] == ["8001", "default"]
    assert shown["options.http-address"] == ["0.0.0.0", f"{file}:11"]
    assert "options.id" not in shown
    assert "options.id" in rows(call("show", "--all").output)


def test_without_origins(file: Path) -> None:
    shown = rows(call("show", "--config", file).output)
    assert shown["server.port"] == ["8080"]


def test_for_programs(file: Path) -> None:
    document = json.loads(call("show", "--json", INFERENCE_CONFIG=str(file)).stdout)
    assert document["server.port"] == {
        "value": 8080,
        "origin": f"{file}:2",
        "kind": "file",
        "variable": "INFERENCE_SERVER_PORT",
    }
    assert document["model.inputs"]["value"] is None


def test_lists_and_folders_of_the_command_line() -> None:
    options = ("--load-model=a", "--load-model", "b", "--model-control-mode=explicit", "folder")
    document = json.loads(call("show", "--json", *options).stdout)
    assert document["repository.load"]["value"] == ["a", "b"]
    assert document["models"]["value"] == ["folder"]


def test_a_warning_is_shown_beside_the_table() -> None:
    result = call("show", INFERENCE_PROT="1")
    assert result.exit_code == 0 and "INFERENCE_PROT is not known: did you mean INFERENCE_PORT?" in result.stderr


def test_mistakes_end_it(file: Path) -> None:
    result = call("show", "--config", file, "--http-prot", "1")
    assert result.exit_code == 2 and "did you mean --http-port?" in result.output
    file.write_text("server: {prot: 1}\n")
    result = call("show", "--config", file)
    assert result.exit_code == 2 and f"{file}:1: server.prot: is not known" in result.output


def test_the_check(file: Path) -> None:
    result = call("check", file, INFERENCE_PORT="x")
    assert result.exit_code == 0 and result.output == f"{file}: no mistakes\n"
    file.write_text("server: {prot: 1, port: x}\nmodle: {}\n")
    result = call("check", file)
    assert result.exit_code == 1
    assert [line.partition(": ")[0] for line in result.output.splitlines()] == [f"{file}:1", f"{file}:1", f"{file}:2"]
    document = json.loads(call("check", "--json", file).stdout)
    assert len(document["problems"]) == 3 and document["file"] == str(file)
    assert call("check", file.with_name("none.yaml")).exit_code == 1


def test_a_server_by_its_file(started: list[ServerSettings], file: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "--config", str(file), "--workers=1", "--metrics-port=8003"])
    assert result.exit_code == 0, result.output
    (settings,) = started
    assert [str(settings.http), str(settings.grpc), settings.workers] == ["0.0.0.0:8080", "127.0.0.1:8001", 1]
    assert (settings.limits.body_bytes, settings.access_log) == (10 * 1024 * 1024, True)
    assert (settings.engine.cache_bytes, settings.engine.cache_ttl_seconds) == (1024 * 1024, 9)
    assert settings.predict is not None and settings.predict.timeout_seconds == 3
    assert [limit.requests for limit in settings.access.rates.limits] == [7]
    assert not settings.traffic.splits and settings.engine.repository.refresh is None


def test_a_server_by_the_environment(
    started: list[ServerSettings], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("INFERENCE_HOST", "10.0.0.1")
    monkeypatch.setenv("INFERENCE_MODEL_PTAH", "x")
    with caplog.at_level(logging.WARNING, "headrace.cli"):
        CliRunner().invoke(app, ["serve"])
    assert str(started[0].http) == "10.0.0.1:8000"
    assert "did you mean INFERENCE_MODEL_PATH?" in caplog.text


def test_flags_for_keys(started: list[ServerSettings]) -> None:
    options = "--inference-timeout-s 2 --rate-limit-per-minute=5 --rate-limit-by key --max-in-flight 9 --cache-ttl-s=1"
    result = CliRunner().invoke(app, ["serve", *options.split()])
    assert result.exit_code == 0, result.output
    (settings,) = started
    assert settings.predict is not None and settings.predict.timeout_seconds == 2
    assert [(limit.requests, limit.by) for limit in settings.access.rates.limits] == [(5, "key")]
    assert (settings.access.concurrency.in_flight, settings.engine.cache_ttl_seconds) == (9, 1)
    assert CliRunner().invoke(app, ["serve", "--allow-predict=false"]).exit_code == 0
    assert started[-1].predict is None


def test_a_model_by_its_path_alone(started: list[ServerSettings], tmp_path: Path) -> None:
    (tmp_path / "echo").mkdir()
    (tmp_path / "echo" / "model.py").write_text("def handle(x: float) -> float:\n    return x\n")
    result = CliRunner().invoke(app, ["serve", "--model-path", str(tmp_path / "echo"), "--device=cpu"])
    assert result.exit_code == 0, result.output
    (settings,) = started
    (repository,) = settings.engine.repositories
    assert not Path(repository).exists()  # gone with the server
    assert settings.predict is not None and settings.predict.model == "echo"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model-path=/no/such/model"], "--model-path: '/no/such/model' does not exist"),
        (["--model-version=v1"], "--model-version: is for the model at model.path, which is not given"),
        (["--device=tpu"], "--device must be cpu, cuda"),
        (["--config=/no/such/file"], "/no/such/file: cannot be read: No such file"),
        (["--max-in-flight=-1"], "--max-in-flight must be a whole number from 0"),
        (["--api-keys-file=/no/such/file"], "there is no file '/no/such/file'"),
    ],
)
def test_what_is_wrong_ends_the_server_before_it_starts(
    started: list[ServerSettings], arguments: list[str], told: str
) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2 and told in result.output
    assert not started


def test_the_splits_of_a_file_that_changes(started: list[ServerSettings], file: Path) -> None:
    file.write_text("traffic: {m: {weights: {1: 1}}}")
    CliRunner().invoke(app, ["serve", "--config", str(file)])
    (settings,) = started
    assert dict(settings.traffic.splits["m"].weights) == {"1": 1}
    assert settings.reload_traffic is not None and settings.traffic_file == str(file)
    file.write_text("traffic: {m: {weights: {1: 0.5, 2: 0.5}}}")
    assert dict(settings.reload_traffic().splits["m"].weights) == {"1": 0.5, "2": 0.5}
    file.write_text("traffic: {m: {weigths: {}}}")
    with pytest.raises(InvalidArgument, match="did you mean 'weights'"):
        settings.reload_traffic()
    CliRunner().invoke(app, ["serve"])
    assert started[-1].reload_traffic is None
