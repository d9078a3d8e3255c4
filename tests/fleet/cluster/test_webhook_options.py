# SPDX-License-Identifier: Apache-2.0
"""The options of webhooks, as they are typed; and an operator whose parts end by themselves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.operator import operator
from headrace.core.errors import FailedPrecondition, HeadraceError
from headrace.fleet.cluster.webhooks.settings import WebhookSettings
from headrace.programs import operator as program
from headrace.programs.operator import OperatorSettings, operate


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--webhook-url", "https://a:1"], "--webhook-url needs --webhook-listen"),
        (["--webhook-listen", "127.0.0.1:1", "--webhook-url", "http://a:1"], "write https://HOST:PORT"),
        (["--webhook-listen", "127.0.0.1:1", "--webhook-failure-policy", "Perhaps"], "write Ignore or Fail"),
        (["--webhook-listen", "9443"], "has no host"),
    ],
)
def test_invalid_options_are_reported_with_advice(words: list[str], said: str) -> None:
    told = CliRunner().invoke(operator, ["run", *words])
    assert told.exit_code == 2 and said in told.output.replace("\n", " ")


def test_options_reach_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[OperatorSettings] = []
    monkeypatch.setattr(program, "run_operator", lambda settings: seen.append(settings) or 0)
    words = ["run", "-n", "x", "--webhook-listen", "0.0.0.0:9443", "--webhook-failure-policy", "Fail"]
    assert CliRunner().invoke(operator, words).exit_code == 0
    assert CliRunner().invoke(operator, ["run"]).exit_code == 0
    assert seen[0].webhooks == WebhookSettings("0.0.0.0:9443", "x", failure_policy="Fail")
    assert seen[1].webhooks is None, "not where nobody asked for them"


class Silent:
    """An API server that never answers."""

    calls = writes = 0

    def __getattr__(self, name: str) -> Any:
        async def call(*given: Any, **named: Any) -> Any:
            await asyncio.Event().wait()

        return call


@pytest.mark.parametrize("fault", [FailedPrecondition("the port is taken; choose another"), OSError("odd")])
def test_webhooks_that_cannot_be_served_end_the_operator(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    from headrace.fleet.cluster.webhooks.server import Webhooks

    async def run(self: Any) -> None:
        raise fault

    monkeypatch.setattr(Webhooks, "run", run)
    settings = OperatorSettings(elect=False, webhooks=WebhookSettings("127.0.0.1:0", "x"))

    async def operated() -> int:
        return await asyncio.wait_for(operate(Silent(), settings, asyncio.Event()), 30)  # type: ignore[arg-type]

    if isinstance(fault, HeadraceError):
        with pytest.raises(FailedPrecondition, match="the port is taken"):
            asyncio.run(operated())
    else:
        assert asyncio.run(operated()) == 1


def test_a_signal_ends_it_whatever_it_waits_for() -> None:
    settings = OperatorSettings(webhooks=WebhookSettings("127.0.0.1:0", "x"))

    async def operated() -> int:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.1, stop.set)
        return await asyncio.wait_for(operate(Silent(), settings, stop), 30)  # type: ignore[arg-type]

    assert asyncio.run(operated()) == 0
