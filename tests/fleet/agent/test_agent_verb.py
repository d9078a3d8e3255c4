# SPDX-License-Identifier: Apache-2.0
"""`headrace model-agent`: what it is told, and what it says when that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from headrace.cli.model_agent import model_agent
from headrace.fleet.agent.agent import AgentSettings

APP = typer.Typer()
APP.command()(model_agent)


def run(*words: str, **environment: str | None) -> Any:
    return CliRunner().invoke(APP, words, env={"NODE_NAME": None, "KUBECONFIG": None, **environment})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "NODE_NAME"),
        (["--node", "a", "--models-root", "models"], "absolute path"),
        (["--node", "a", "--keep-free", "lots"], "10GB or 500MiB"),
        (["--node", "a", "--kubeconfig", "/absent"], "kubeconfig"),
    ],
)
def test_impossible_options_are_reported_in_one_line(words: list[str], said: str) -> None:
    result = run(*words, "--log-format", "text")
    assert result.exit_code == 2 and said in result.output + result.stderr
    assert "Traceback" not in result.output


def test_options_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[AgentSettings] = []
    monkeypatch.setattr("headrace.programs.model_agent.run_agent", lambda settings: seen.append(settings) or 7)
    result = run("--download-concurrency", "5", "--keep-free", "1.5GiB", "--private-host", "10.0.0.0/8", NODE_NAME="n")
    assert result.exit_code == 7
    (settings,) = seen
    assert (settings.node, settings.downloads, settings.keep_free_bytes) == ("n", 5, 3 * 2**29)
    assert settings.models_root == Path("/mnt/models") and settings.fetch.private_hosts == ("10.0.0.0/8",)
