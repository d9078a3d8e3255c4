# SPDX-License-Identifier: Apache-2.0
"""`headrace serve`: the settings of its options, and options that exclude each other."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_serve_page import SEED, TODAY
from typer.testing import CliRunner

from headrace.api.v2.settings import TraceDefaults
from headrace.cli.main import app
from headrace.programs.configuration.option_table import FLAGS
from headrace.programs.serve import server
from headrace.programs.serve.server import ServerSettings


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServerSettings]:
    """The settings that a server would have been started with."""
    settings: list[ServerSettings] = []

    def run_server(given: ServerSettings) -> int:
        settings.append(given)
        return 0

    monkeypatch.setattr(server, "run_server", run_server)
    monkeypatch.setattr("headrace.cli.progress.configure_logging", lambda *_: None)
    return settings


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, "headrace.cli"):
        yield caplog


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["serve", *arguments])


def serve(started: list[ServerSettings], *arguments: str) -> ServerSettings:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return started[-1]


def test_without_a_folder_the_built_in_models(started: list[ServerSettings]) -> None:
    engine = serve(started).engine
    assert engine.repositories == ()
    assert (engine.strict_readiness, engine.repository.exit_on_error) == (True, False)
    assert (engine.repository.mode, engine.repository.poll_seconds) == ("poll", 15)
    assert (engine.cache_bytes, engine.repository.model_load_thread_count) == (64 * 1024 * 1024, 4)


def test_folders_by_every_name(started: list[ServerSettings]) -> None:
    settings = serve(started, "one", "two", "--model-repository", "three", "--model-store=four", "--", "-five")
    assert settings.engine.repositories == ("one", "two", "-five", "three", "four")


FALSE = ["=false", "=False", "=0", " false", " 0", "=no"]


@pytest.mark.parametrize("form", FALSE)
@pytest.mark.parametrize("name", ["--strict-readiness", "--strict_readiness"])
def test_a_switch_is_turned_off_in_every_form(started: list[ServerSettings], name: str, form: str) -> None:
    assert serve(started, "models", *f"{name}{form}".split()).engine.strict_readiness is False


@pytest.mark.parametrize(
    "form", ["--exit-on-error", "--exit-on-error=true", "--exit-on-error True", "--exit_on_error=1"]
)
def test_a_switch_is_turned_on_in_every_form(started: list[ServerSettings], form: str) -> None:
    settings = serve(started, *form.split(), "models")
    assert settings.engine.repository.exit_on_error is True
    assert settings.engine.repositories == ("models",)


def test_the_other_options_about_models(started: list[ServerSettings]) -> None:
    given = (
        "--model-control-mode=explicit --load-model a --load-model b --model-load-thread-count 2 "
        "--response-cache-byte-size 0 --strict-model-config=true "
        "--rate-limit-resource memory:4 --rate-limit-resource lanes:1 --trial-load always --trial-load-bytes 500000000"
    )
    engine = serve(started, "models", *given.split()).engine
    assert (engine.repository.mode, engine.repository.load_models) == ("explicit", ("a", "b"))
    assert (engine.repository.model_load_thread_count, engine.cache_bytes) == (2, 0)
    assert engine.repository.strict_model_config is True
    assert (engine.repository.trial_load, engine.repository.trial_load_bytes) == ("always", 500_000_000)
    assert engine.rate_limit_resources == {"memory": 4, "lanes": 1}


@pytest.mark.parametrize("option", ["--repository-poll-secs", "--file-system-poll-secs"])
def test_how_often_folders_are_checked(started: list[ServerSettings], option: str) -> None:
    repository = serve(started, "models", option, "5").engine.repository
    assert (repository.mode, repository.poll_seconds) == ("poll", 5)
    assert serve(started, "models", option, "0").engine.repository.mode == "none"


@pytest.mark.parametrize(
    ("option", "mode"),
    [
        ("--allow-poll-model-repository=false", "none"),
        ("--allow-model-load-unload=false", "none"),
        ("--allow-model-load-unload", "poll"),
        ("--allow-model-control", "explicit"),
        ("--allow-poll-model-repository=false --allow-model-control=true", "explicit"),
        ("--allow-model-control=false", "poll"),
    ],
)
def test_modes_by_their_old_names(started: list[ServerSettings], option: str, mode: str) -> None:
    assert serve(started, "models", *option.split()).engine.repository.mode == mode


def test_the_cache_by_todays_name(started: list[ServerSettings], warned: pytest.LogCaptureFixture) -> None:
    settings = serve(started, "--cache-config", "local,size=1048576", "--cache-config=redis,host=elsewhere")
    assert settings.engine.cache_bytes == 1048576
    assert "redis,host=elsewhere has no effect" in warned.text


def test_where_it_listens(started: list[ServerSettings]) -> None:
    usual = serve(started)
    assert [str(usual.http), str(usual.grpc), str(usual.metrics)] == [
        "127.0.0.1:8000",
        "127.0.0.1:8001",
        "127.0.0.1:8002",
    ]
    assert usual.listening.metrics_optional
    reported = serve(
        started,
        *[
            "--http-address",
            "0.0.0.0",
            "--http-port=80",
            "--grpc-address=::1",
            "--grpc-port",
            "81",
            "--metrics-port",
            "82",
        ],
    )
    assert [str(reported.http), str(reported.grpc), str(reported.metrics)] == ["0.0.0.0:80", "[::1]:81", "0.0.0.0:82"]
    assert not reported.listening.metrics_optional
    apart = serve(started, "--host=10.0.0.1", "--metrics-address", "127.0.0.1")
    assert [str(apart.http), str(apart.grpc), str(apart.metrics)] == [
        "10.0.0.1:8000",
        "10.0.0.1:8001",
        "127.0.0.1:8002",
    ]


def test_strangers_without_keys_have_no_admin(started: list[ServerSettings], tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: []\n")
    assert serve(started).allow_admin
    assert serve(started, "--http-socket", str(tmp_path / "socket"), "--allow-grpc=false").allow_admin
    assert not serve(started, "--http-address", "0.0.0.0").allow_admin
    assert not serve(started, "--grpc-address", "10.0.0.1").allow_admin
    assert serve(started, "--host", "0.0.0.0", "--api-keys-file", str(keys)).allow_admin


def test_where_openai_batches_are_kept(
    started: list[ServerSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers of one user do not share a folder by chance: they may have other models."""
    monkeypatch.delenv("HEADRACE_STATE_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def openai(*options: str) -> Any:
        return serve(started, "models", *options).openai

    default = openai()
    assert (default.batch_folder, default.batch_lines) == (tmp_path / "headrace/openai/batches-8000", 16)
    assert openai("--http-port", "9000").batch_folder == tmp_path / "headrace/openai/batches-9000"
    assert openai("--allow-http", "false").batch_folder == tmp_path / "headrace/openai/batches-0"
    given = openai("--openai-state-dir", "/x/y", "--http-port", "9000", "--openai-batch-lines", "3")
    assert (given.batch_folder, given.batch_lines) == (Path("/x/y/batches"), 3)
    assert openai("--allow-openai-batches", "false").batch_folder is None
    assert not list(tmp_path.iterdir())


def test_ports_that_stay_closed(started: list[ServerSettings]) -> None:
    assert serve(started, "--allow-http=false").http is None
    assert serve(started, "--allow-grpc", "false").grpc is None
    assert serve(started, "--allow-metrics=0").metrics is None
    free = serve(started, "--http-port", "0")
    assert free.metrics is None  # and at /metrics of the HTTP port
    assert str(serve(started, "--http-port", "0", "--metrics-port", "0").metrics) == "127.0.0.1:0"


def test_tls_as_triton_has_it(started: list[ServerSettings]) -> None:
    files = ("--grpc-server-cert=c", "--grpc-server-key=k", "--grpc-root-cert=r")
    alone = serve(started, "--grpc-use-ssl=true", *files).listening
    assert alone.tls is None and alone.grpc_tls is not None
    assert (alone.grpc_tls.certificate, alone.grpc_tls.key, alone.grpc_tls.client_ca) == ("c", "k", None)
    mutual = serve(started, "--grpc-use-ssl-mutual", "1", *files).listening
    assert mutual.grpc_tls is not None and mutual.grpc_tls.client_ca == "r"
    assert serve(started, *files).listening.grpc_tls is None
    ours = serve(started, "--tls-certificate=c", "--tls-key=k").listening
    assert ours.tls is not None and ours.grpc_tls is None


def test_sizes_and_times(started: list[ServerSettings]) -> None:
    settings = serve(started, "--max-body-bytes=1000", "--exit-timeout-secs=3", "--processes", "2")
    assert (settings.limits.body_bytes, settings.limits.message_bytes) == (1000, 1000)
    assert (settings.grace_seconds, settings.workers) == (3, 2)
    limits = serve(started, "--http-max-input-size", "7").limits
    assert (limits.body_bytes, limits.message_bytes) == (7, 64 * 1024 * 1024)
    assert serve(started, "--workers=3").workers == 3


def test_options_reach_the_protocols(started: list[ServerSettings]) -> None:
    settings = serve(
        started,
        "--id=here",
        "--allow-client-shm",
        "--allow-profiling=true",
        "--http-header-forward-pattern=x-.*",
        "--grpc-header-forward-pattern=y-.*",
        "--http-restricted-api=statistics,trace:key=secret",
        "--grpc-restricted-protocol",
        "health:key=secret",
    )
    assert (settings.v1.server_id, settings.v2.server_id) == ("here", "here")
    assert settings.v2.allow_client_shm and settings.v1.allow_profiling
    assert (settings.v2.http_header_forward_pattern, settings.v2.grpc_header_forward_pattern) == ("x-.*", "y-.*")
    assert settings.v2.http_restrictions[0].apis == ("statistics", "trace")
    assert settings.v2.grpc_restrictions[0].apis == ("health",)
    usual = serve(started)
    assert usual.metrics_settings is not None and usual.metrics_settings.interval_ms == 2000
    assert serve(started, "--allow-metrics=false").metrics_settings is None
    measured = serve(
        started, "--metrics-config", "summary_latencies=true", "--allow-gpu-metrics=false"
    ).metrics_settings
    assert measured is not None and measured.summary_latencies and not measured.gpu
    assert started[-1].engine.summary_quantiles
    assert (usual.v1.server_id, usual.v2.server_id) == ("inference:0", "headrace")


@pytest.mark.parametrize(
    ("options", "level"),
    [
        ("", "info"),
        ("--log-verbose=1", "debug"),
        ("--log-verbose=0", "info"),
        ("--log-level=warning", "warning"),
        ("--log-info=false", "warning"),
        ("--log-info=false --log-warning=false", "error"),
        ("--log-info False --log-warning False --log-error False", "critical"),
    ],
)
def test_levels_of_the_log(
    started: list[ServerSettings], monkeypatch: pytest.MonkeyPatch, options: str, level: str
) -> None:
    received: list[Any] = []
    monkeypatch.setattr("headrace.cli.progress.configure_logging", lambda *given: received.extend(given))
    serve(started, *options.split(), "--log-format=ISO8601")
    assert received[:2] == [level, "text"]


def test_the_log_in_a_file(tmp_path: Path) -> None:
    log = tmp_path / "log"
    result = call(f"--log-file={log}", "--log-format=text", "--http-thread-count=8", str(tmp_path / "nowhere"))
    assert result.exit_code == 2
    assert "--http-thread-count does nothing here" in log.read_text()


def test_traces(started: list[ServerSettings], warned: pytest.LogCaptureFixture) -> None:
    ours = serve(started, "--trace-endpoint=http://c:4318")
    assert (ours.trace_endpoint, ours.v2.trace) == ("http://c:4318", None)
    given = "--trace-config mode=opentelemetry --trace-config=level=timestamps --trace-config rate=10"
    tritons = serve(started, *given.split(), "--trace-config=opentelemetry,url=http://c:4318/v1/traces")
    assert tritons.trace_endpoint == "http://c:4318/v1/traces"
    assert tritons.v2.trace == TraceDefaults(("TIMESTAMPS",), 10, mode="opentelemetry")
    assert not warned.text
    old = "--trace-level=TENSORS --trace-rate=1 --trace-count 5 --trace-log-frequency=2 --trace-file=f"
    files = serve(started, *old.split())
    assert not files.trace_endpoint
    assert files.v2.trace == TraceDefaults(("TENSORS",), 1, 5, 2, file="f")
    assert serve(started, "--trace-count=0").v2.trace == TraceDefaults(("OFF",), count=0)
    assert "writes no trace files" in warned.text


def test_options_without_effect_are_refused_in_one_line(
    started: list[ServerSettings], warned: pytest.LogCaptureFixture
) -> None:
    serve(
        started,
        *["--http-thread-count", "4", "--backend-config=python,shm=1", "--cuda-memory-pool-byte-size", "0:64"],
        *["--pinned-memory-pool-byte-size=1", "--tf-allow-soft-placement", "--model-namespacing=false"],
        *["--allow-sagemaker", "models", "--rate-limit=off", "--rate-limit-resource=R:2:0"],
    )
    assert started[0].engine.repositories == ("models",)
    assert [record.message.split()[0] for record in warned.records] == [
        "--http-thread-count",
        "--backend-config",
        "--cuda-memory-pool-byte-size",
        "--pinned-memory-pool-byte-size",
        "--allow-sagemaker",
        "--rate-limit=off",
        "--rate-limit-resource",
    ]
    assert all("\n" not in record.message for record in warned.records)
    assert started[0].engine.rate_limit_resources == {"R": 2}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["models", "--model-control-mode", "sometimes"], "none or poll or explicit"),
        (["--model-control-mode=explicit"], "needs a folder of models"),
        (["models", "--load-model", "a"], "--model-control-mode=explicit"),
        (["models", "--strict-readiness=maybe"], "--strict-readiness must be true or false"),
        (["models", "--rate-limit-resource", "memory"], "NAME:COUNT"),
        (["models", "--rate-limit-resource", "memory:0"], "NAME:COUNT"),
        (["models", "--rate-limit-resource", "memory:1:a"], "NAME:COUNT"),
        (["models", "--repository-poll-secs", "-1"], "--repository-poll-secs must be a number of 0 or more, not '-1'"),
        (["--http-port=65536"], "--http-port must be a whole number from 0 to 65535"),
        (["--http-port=nan"], "--http-port must be a whole number"),
        (["--grace-seconds=inf"], "--grace-seconds must be a number of 0 or more"),
        (["--http-port"], "--http-port needs a value: write --http-port=PORT"),
        (["--id", "--http-port=1"], "--id needs a value"),
        (["--backend-config"], "--backend-config needs a value"),
        (["--http-port=90", "--grpc-port=90"], "port 90 is used twice"),
        (["--metrics-port=8001"], "port 8001 is used twice"),
        (["--allow-http=false", "--allow-grpc=false"], "nothing to serve"),
        (["--grpc-use-ssl"], "--grpc-server-cert"),
        (["--grpc-use-ssl-mutual", "--grpc-server-cert=c", "--grpc-server-key=k"], "--grpc-root-cert"),
        (["--tls-key=k"], "--tls-certificate"),
        (["--cache-config=local,size=much"], "local,size=BYTES"),
        (["--trace-config=rate"], "SETTING=VALUE"),
        (["--trace-config=zipkin,url=x"], "SETTING=VALUE"),
        (["--trace-config=mode=files"], "triton or opentelemetry"),
        (["--trace-config=rate=0"], "a whole number from 1"),
        (["--trace-level=EVERYTHING"], "OFF, TIMESTAMPS, TENSORS"),
        (["--metrics-config=speed=1"], "--metrics-config"),
        (["--allow-model-control", "--model-control-mode=poll"], "use --model-control-mode alone"),
        (["--log-format=xml"], "auto, json or text"),
        (["--log-file=/no/such/folder/log"], "--log-file"),
        (["--http-restricted-api=everything:a=b"], "everything"),
    ],
)
def test_invalid_options_are_reported_in_a_sentence(
    started: list[ServerSettings], arguments: list[str], told: str
) -> None:
    result = call(*arguments)
    assert result.exit_code == 2 and told in result.output
    assert not started


@pytest.mark.parametrize(
    ("option", "near"),
    [
        ("--model-repo=x", "--model-repository"),
        ("--model_repositry", "--model-repository"),
        ("--http-prot=1", "--http-port"),
        ("--strict-rediness=false", "--strict-readiness"),
        ("--backend-dir", "--backend-directory"),
        ("--worker=2", "--workers"),
        ("--exit-timeout", "--exit-timeout-secs"),
    ],
)
def test_an_unknown_option_names_the_nearest(started: list[ServerSettings], option: str, near: str) -> None:
    result = call("models", option)
    assert result.exit_code == 2
    assert f"there is no option {option.partition('=')[0]}: did you mean {near}?" in result.output


@pytest.mark.parametrize("option", ["--zzzzzzzzzz", "-v", "---"])
def test_an_unknown_option_without_a_neighbour(started: list[ServerSettings], option: str) -> None:
    result = call(option)
    assert result.exit_code == 2 and "'headrace serve --help' lists the options" in result.output


def test_help_has_every_option_once_under_its_heading() -> None:
    text = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).output
    for heading in ("Models", "Listening", "Protocols", "Metrics", "Workers and limits", "Logs and traces"):
        assert f" {heading} " in text
    assert "headrace serve models --workers 2" in text
    assert "Also --file-system-poll-secs" in text and "Default: 8000" in text


CHANGES = {
    "model-store": "four",
    "model-repository": "four",
    "model-control-mode": "none",
    "repository-poll-secs": "5",
    "file-system-poll-secs": "5",
    "allow-model-load-unload": "false",
    "model-namespacing": "true",
    "load-model": "a --model-control-mode explicit",
    "strict-model-config": "true",
    "disable-auto-complete-config": "true",
    "strict-readiness": "false",
    "exit-on-error": "true",
    "model-load-thread-count": "2",
    "response-cache-byte-size": "0",
    "cache-config": "local,size=1000",
    "rate-limit-resource": "memory:4",
    "http-port": "8123",
    "grpc-port": "8124",
    "metrics-port": "8125",
    "http-address": "127.0.0.2",
    "grpc-address": "127.0.0.2",
    "metrics-address": "127.0.0.2",
    "allow-http": "false",
    "allow-grpc": "false",
    "reuse-http-port": "true",
    "reuse-grpc-port": "true",
    "grpc-use-ssl": "true --grpc-server-cert c --grpc-server-key k",
    "grpc-use-ssl-mutual": "true --grpc-server-cert c --grpc-server-key k --grpc-root-cert r",
    "grpc-server-cert": "c --grpc-use-ssl true --grpc-server-key k",
    "grpc-server-key": "k --grpc-use-ssl true --grpc-server-cert c",
    "grpc-root-cert": "r --grpc-use-ssl-mutual true --grpc-server-cert c --grpc-server-key k",
    "id": "other",
    "http-header-forward-pattern": "x-.*",
    "grpc-header-forward-pattern": "x-.*",
    "http-restricted-api": "metadata:key=value",
    "grpc-restricted-protocol": "metadata:key=value",
    "allow-client-shm": "true",
    "allow-profiling": "true",
    "allow-metrics": "false",
    "allow-gpu-metrics": "false",
    "allow-cpu-metrics": "false",
    "metrics-interval-ms": "500",
    "metrics-config": "summary_latencies=true",
    "http-max-input-size": "100000",
    "exit-timeout-secs": "7",
    "trace-config": "mode=opentelemetry",
    "trace-file": "f",
    "trace-level": "TIMESTAMPS",
    "trace-rate": "7",
    "trace-count": "7",
    "trace-log-frequency": "7",
}
"""A value of each option of Triton that differs from its default, with the options that it needs."""
OF_THE_LOG = {"log-format", "log-file", "log-verbose", "log-info", "log-warning", "log-error"}
WITHOUT_EFFECT = {"rate-limit"}
"""Its limits always apply, as the page of options says."""


def test_every_option_of_triton_is_tested_here() -> None:
    ours = {name for option in FLAGS.values() for name in option.flags} & set(f"{SEED} {TODAY}".split())
    assert ours - OF_THE_LOG - WITHOUT_EFFECT == set(CHANGES)


def settings_text(settings: ServerSettings) -> str:
    """All values, without the addresses of objects such as clocks."""
    return re.sub(r" at 0x\w+", "", repr(settings))


@pytest.mark.parametrize("name", CHANGES)
def test_every_option_of_triton_changes_the_server(started: list[ServerSettings], name: str) -> None:
    plain = settings_text(serve(started, "models"))
    assert settings_text(serve(started, "models")) == plain
    assert settings_text(serve(started, "models", f"--{name}", *CHANGES[name].split())) != plain
