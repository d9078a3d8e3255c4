# SPDX-License-Identifier: Apache-2.0
"""Which service is meant: never silently the latest."""

from __future__ import annotations

from headrace.platforms.registry import Entry
from headrace.platforms.services import Ambiguous, NoTarget, Target, request_target, stop_target

A = Entry("a", "process", "cosmos-rl", "http://localhost:8080", "2026-01-01T00:00:00Z")
B = Entry("b", "process", "cosmos-predict2.5", "http://localhost:8081", "2026-01-02T00:00:00Z")
C = Entry("c", "local-docker", "cosmos-rl", "http://localhost:8082", "2026-01-03T00:00:00Z")
STARTED = Entry("d", "process", "cosmos-rl", "", "2026-01-04T00:00:00Z", "starting")


def _all(*entries: Entry) -> dict[str, Entry]:
    return {entry.job_id: entry for entry in entries}


def test_a_job_id_decides() -> None:
    assert request_target(_all(A, B, C), "b") == Target(B)
    assert request_target(_all(A, B, C), "b", "cosmos-rl") == Target(B)


def test_a_job_id_that_is_not_there_is_refused() -> None:
    for job_id in ("x", "latest", "a\n"):
        assert isinstance(request_target(_all(A), job_id), NoTarget)


def test_an_architecture_decides_if_one_service_has_it() -> None:
    assert request_target(_all(A, B), network_arch="cosmos-rl") == Target(A)
    assert request_target(_all(A, B), network_arch="Cosmos-RL") == Target(A)


def test_several_services_of_an_architecture_need_a_choice() -> None:
    result = request_target(_all(C, A, B), network_arch="cosmos-rl")
    assert isinstance(result, Ambiguous)
    assert result.candidates == (A, C)
    assert result.shown == ("job_id", "started_at")


def test_none_of_an_architecture_is_refused() -> None:
    result = request_target(_all(A), network_arch="tao-dataservices")
    assert isinstance(result, NoTarget)
    assert "no service for 'tao-dataservices' is running" in result.text


def test_the_only_service_is_the_default() -> None:
    assert request_target(_all(B)) == Target(B)


def test_of_several_services_one_must_be_chosen() -> None:
    result = request_target(_all(C, B, A))
    assert isinstance(result, Ambiguous)
    assert result.candidates == (A, B, C)
    assert result.shown == ("job_id", "network_arch", "host_url")


def test_without_services_one_is_to_be_started() -> None:
    assert request_target({}) == NoTarget("no service is running: start one first")


def test_a_service_without_an_address_is_not_queried() -> None:
    assert request_target(_all(A, STARTED)) == Target(A)
    assert request_target(_all(STARTED)) == NoTarget("no service is running: start one first")
    result = request_target(_all(A, STARTED), "d")
    assert isinstance(result, NoTarget)
    assert "still being started" in result.text


def test_the_latest_is_stopped_only_when_confirmed() -> None:
    result = stop_target(_all(A, B), "b")
    assert isinstance(result, Target)
    assert result.entry == B
    assert "b (cosmos-predict2.5 on process)" in result.confirm
    assert stop_target(_all(A, B), "b", "a") == Target(A)
    assert stop_target(_all(STARTED), None, "d") == Target(STARTED)


def test_nothing_to_stop_is_reported() -> None:
    for found in (
        stop_target({}, None),
        stop_target(_all(A), None),
        stop_target(_all(A), "gone"),
        stop_target({}, None, "x"),
    ):
        assert isinstance(found, NoTarget)
