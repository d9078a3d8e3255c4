# SPDX-License-Identifier: Apache-2.0
"""The wall clock jumps by a year, back and forth: only what is a date notices. Durations are of the other clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.api.access.api_keys import KeyRing, create_key
from headrace.api.access.concurrency import InFlight
from headrace.api.access.rate_limits import RateLimiter
from headrace.api.access.settings import RateLimit
from headrace.core.clock import ManualClock
from headrace.engine.repository.scan import ChangeDetector, scan

YEAR = 366 * 86400.0
JUMPS = (YEAR, -2 * YEAR, 0.5, YEAR, -3600.0)


class JumpingClock(ManualClock):
    def jump(self, seconds: float) -> None:
        """Somebody sets the wall clock."""
        self._wall_offset += seconds


def test_rates_and_what_is_in_flight_do_not_notice() -> None:
    clock = JumpingClock(10.0)
    rates, flow = RateLimiter([RateLimit(requests=2, seconds=60.0)]), InFlight(1, clock)
    flow.enter(clock.monotonic(), None)
    assert rates.take([b"a"], clock.monotonic())[1] >= 0
    assert rates.take([b"a"], clock.monotonic())[1] >= 0
    for seconds in JUMPS:
        clock.jump(seconds)
        rule, debt = rates.take([b"a"], clock.monotonic())
        assert debt < 0
        assert b"ratelimit-remaining: 0" in rule.header_lines(debt, clock.wall())
        assert rule.refusal(debt).retry_after_seconds == pytest.approx(30.0)
    clock.advance(31.0)
    assert rates.take([b"a"], clock.monotonic())[1] >= 0
    flow.leave()
    assert flow.count == 0
    rates.close()


def test_a_key_is_good_until_its_date_and_again_before_it(tmp_path: Path) -> None:
    clock = JumpingClock(10.0)
    key = create_key(tmp_path / "keys.yaml", "a", ["infer"], created=clock.wall(), expires=clock.wall() + 3600)
    ring = KeyRing(tmp_path / "keys.yaml", clock)
    fields = {b"x-api-key": key.encode()}
    for seconds, good in ((0.0, True), (2 * 3600.0, False), (-2 * 3600.0, True), (-YEAR, True)):
        clock.jump(seconds)
        assert (ring.find(fields, clock.monotonic()) is not None) is good


def test_a_model_is_loaded_whatever_the_clock(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "identity"')
    written = scan([tmp_path]).models["m"].changed
    for seconds in JUMPS:
        watch = ChangeDetector(settle_seconds=1.0)
        results = [len(watch.diff(scan([tmp_path]), written + seconds).to_load) for _ in range(2)]
        # At once if it is quiet by the clock; else when it looks the same twice, though that clock says "in a year".
        assert sum(results) == 1
        assert not watch.diff(scan([tmp_path]), written - seconds).removed
