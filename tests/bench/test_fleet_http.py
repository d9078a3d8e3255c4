# SPDX-License-Identifier: Apache-2.0
"""The simulated engines behind a real router: what is measured over HTTP is what the engines' times come to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from bench.fleet_http import Outcome, Sent, _blocks_of, _unchunked, summarize, table
from bench.fleet_sim import BLOCK_TOKENS, Request, text_of

ROOT = Path(__file__).parents[2]


def test_an_engine_reads_the_blocks_of_a_prompt() -> None:
    text = text_of((7, 300_000)) + "#r12~".ljust(40, "~")
    body = orjson.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 5})
    assert _blocks_of(body) == ([7, 300_000], 10)
    assert _unchunked(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n") == b"abcde"


def test_a_summary_leaves_out_the_first_quarter_and_tells_tenants_apart() -> None:
    def sent(arrived: float, took: float, tenant: int = 0, status: int = 200) -> Sent:
        request = Request(arrived, (1,), BLOCK_TOKENS, 11, cached_tokens=128)
        request.first_token, request.done = arrived + took, arrived + took + 0.1
        return Sent(request, tenant, status)

    requests = [sent(0.0, 9.0), sent(30.0, 1.0), sent(40.0, 3.0, tenant=1), sent(50.0, 0.0, tenant=1, status=503)]
    outcome = summarize(Outcome("one", 0.8), requests, 100.0)
    assert (outcome.requests, outcome.failed, outcome.others_failed) == (3, 1, 1)
    assert outcome.first_token["p99"] == pytest.approx(3.0)
    assert outcome.others["p50"] == pytest.approx(3.0)
    assert outcome.hit_rate == pytest.approx(0.25)
    assert "| 80% | `one` | 3 | 1 |" in table([outcome])


@pytest.mark.slow
def test_every_request_is_answered_behind_a_real_router() -> None:
    words = ["--router", "kv_events", "--replicas", "2", "--seconds", "6", "--json"]
    command = [sys.executable, "-m", "bench.fleet_http", *words]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300, check=True)
    [outcome] = orjson.loads(finished.stdout)
    assert outcome["failed"] == 0
    assert outcome["requests"] > 5
    assert 0.0 < outcome["first_token"]["p50"] < 60.0
