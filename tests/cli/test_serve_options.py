# SPDX-License-Identifier: Apache-2.0
"""`headrace serve`: what the options become, and which do not go together."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.apps import server
from headrace.apps.server import ServerSettings
from headrace.cli.main import app


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[ServerSettings]:
    """The settings that a server would have been started with."""
    settings: list[ServerSettings] = []

    def run_server(given: ServerSettings) -> int:
        settings.append(given)
        return 0

    monkeypatch.setattr(server, "run_server", run_server)
    monkeypatch.setattr("headrace.cli.progress.configure_logging", lambda *_: None)
    return settings


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["serve", *arguments])


def test_without_a_folder_the_built_in_models(seen: list[ServerSettings]) -> None:
    assert call().exit_code == 0
    engine = seen[0].engine
    assert engine.repositories == ()
    assert (engine.strict_readiness, engine.repository.exit_on_error) == (True, False)
    assert (engine.repository.mode, engine.repository.poll_seconds) == ("poll", 15)
    assert (engine.cache_bytes, engine.repository.model_load_thread_count) == (64 * 1024 * 1024, 4)


def test_folders_by_every_name(seen: list[ServerSettings]) -> None:
    assert call("one", "two", "--model-repository", "three", "--model-store=four").exit_code == 0
    assert seen[0].engine.repositories == ("one", "two", "three", "four")


@pytest.mark.parametrize("option", ["--strict-readiness=false", "--strict-readiness=False", "--strict-readiness=0"])
def test_flags_as_the_guide_of_2018_writes_them(seen: list[ServerSettings], option: str) -> None:
    assert call("models", option, "--exit-on-error=true").exit_code == 0
    assert seen[0].engine.strict_readiness is False
    assert seen[0].engine.repository.exit_on_error is True


def test_the_other_options_about_models(seen: list[ServerSettings]) -> None:
    given = (
        "--model-control-mode=explicit --load-model a --load-model b --model-load-thread-count 2 "
        "--response-cache-byte-size 0 --strict-model-config=true "
        "--rate-limit-resource memory:4 --rate-limit-resource lanes:1"
    )
    assert call("models", *given.split()).exit_code == 0
    engine = seen[0].engine
    assert (engine.repository.mode, engine.repository.load_models) == ("explicit", ("a", "b"))
    assert (engine.repository.model_load_thread_count, engine.cache_bytes) == (2, 0)
    assert engine.repository.strict_model_config is True
    assert engine.rate_limit_resources == {"memory": 4, "lanes": 1}


@pytest.mark.parametrize("option", ["--repository-poll-secs", "--file-system-poll-secs"])
def test_how_often_folders_are_looked_at(seen: list[ServerSettings], option: str) -> None:
    assert call("models", option, "5").exit_code == 0
    assert call("models", option, "0").exit_code == 0
    assert (seen[0].engine.repository.mode, seen[0].engine.repository.poll_seconds) == ("poll", 5)
    assert seen[1].engine.repository.mode == "none"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["models", "--model-control-mode", "sometimes"], "none, poll or explicit"),
        (["models", "--model-control-mode=explicit", "--processes=2"], "each process would have its own set"),
        (["--model-control-mode=explicit"], "needs a folder of models"),
        (["models", "--load-model", "a"], "--model-control-mode=explicit"),
        (["models", "--strict-readiness=maybe"], "--strict-readiness is true or false"),
        (["models", "--rate-limit-resource", "memory"], "NAME:COUNT"),
        (["models", "--rate-limit-resource", "memory:0"], "NAME:COUNT"),
        (["models", "--repository-poll-secs", "-1"], "Invalid value"),
    ],
)
def test_what_is_wrong_is_told_in_a_sentence(seen: list[ServerSettings], arguments: list[str], told: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2 and told in result.output
    assert not seen
