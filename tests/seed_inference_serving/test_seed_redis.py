# SPDX-License-Identifier: Apache-2.0
"""Two real servers that share one limit through a real Redis."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from seed_programs import serve_process

from support.redis_servers import redis_process

BODY = {"inputs": [1.0]}
LIMIT = 60


@pytest.mark.platform
def test_a_limit_applies_across_two_servers(tmp_path: Path) -> None:
    with redis_process(tmp_path) as redis:
        options = ("--rate-limit-per-minute", str(LIMIT), "--rate-limit-redis-url", redis.url)
        with (
            serve_process(tmp_path / "one", *options) as one,
            serve_process(tmp_path / "two", *options) as two,
            one.client() as first,
            two.client() as second,
        ):
            for item in (one, two):  # it is ready, and has found Redis: either may come first
                item.wait_for("Redis")
            began = time.monotonic()
            statuses = [
                client.ask("/predict/identity", BODY).status for _ in range(LIMIT) for client in (first, second)
            ]
            # One a second is added.
            assert set(statuses) == {200, 429}
            assert LIMIT <= statuses.count(200) <= LIMIT + 5 + (time.monotonic() - began)
            assert statuses[:20] == [200] * 20
