# SPDX-License-Identifier: Apache-2.0
"""`/v1/files` and `/v1/batches` with OpenAI's own client: what a batch makes, and what may happen to it on the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from batch_served import CHAT, Served, batches_served, line

from support.waiting import eventually


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with batches_served(tmp_path_factory.mktemp("state")) as server:
        yield server


@pytest.mark.parametrize("endpoint", [CHAT, "/v1/completions", "/v1/embeddings", "/v1/responses"])
def test_a_batch_of_each_endpoint(served: Served, endpoint: str) -> None:
    begun = served.begin([line(number, url=endpoint) for number in range(30)], endpoint, metadata={"a": "b"})
    assert (begun.status, begun.object, begun.endpoint, begun.metadata) == ("validating", "batch", endpoint, {"a": "b"})
    batch = served.ended(begun.id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 30, "completed": 30, "failed": 0}
    assert (batch.error_file_id, batch.errors, batch.completion_window) == (None, None, "24h")
    assert batch.in_progress_at and batch.finalizing_at and batch.completed_at
    assert batch.expires_at == batch.created_at + 86_400
    assert batch.model == ("letters" if endpoint == "/v1/embeddings" else "parrot")
    lines = served.lines_of(batch.output_file_id)
    assert sorted(each["custom_id"] for each in lines) == sorted(f"line-{number}" for number in range(30))
    assert all(each["error"] is None and each["id"].startswith("batch_req_") for each in lines)
    assert len({each["id"] for each in lines}) == 30
    response = next(each["response"] for each in lines if each["custom_id"] == "line-7")
    assert response["status_code"] == 200
    assert response["request_id"]
    body = response["body"]
    live_status, live, _ = served.ask(endpoint, line(7, url=endpoint)["body"])
    assert live_status == 200
    assert body.keys() == live.keys()
    if endpoint == CHAT:
        assert body["choices"] == live["choices"]
        assert body["choices"][0]["message"]["content"] == "words 7"
    assert batch.usage is not None
    assert batch.usage.input_tokens == 60
    eventually(lambda: not (served.folder / "batches" / "work" / batch.id).exists())


def test_failed_lines_are_in_the_error_file(served: Served) -> None:
    lines = [line(0), line(1, temperature=9), line(2, "REFUSE"), line(3, model="nobody"), line(4, "CRASH")]
    batch = served.ended(served.begin(lines).id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 5, "completed": 1, "failed": 4}
    assert [each["custom_id"] for each in served.lines_of(batch.output_file_id)] == ["line-0"]
    failed = {each["custom_id"]: each for each in served.lines_of(batch.error_file_id)}
    assert {name: each["response"]["status_code"] for name, each in failed.items()} == {
        "line-1": 400,
        "line-2": 400,
        "line-3": 404,
        "line-4": 500,
    }
    assert failed["line-1"]["response"]["body"]["error"]["param"] == "temperature"
    assert failed["line-3"]["response"]["body"]["error"]["code"] == "model_not_found"
    assert all(each["error"] is None for each in failed.values())


def test_a_batch_without_any_success_has_no_output(served: Served) -> None:
    batch = served.ended(served.begin([line(0, model="nobody")]).id)
    assert (batch.status, batch.output_file_id) == ("completed", None)
    assert batch.error_file_id


def test_cancelled_in_the_middle(served: Served) -> None:
    before = served.wordy.parrot.cancelled
    batch = served.begin([*(line(number) for number in range(8)), *(line(8 + i, "FOREVER") for i in range(8))])
    eventually(lambda: (counts := served.batch(batch.id).request_counts) is not None and counts.completed == 8)
    cancelling = served.client().batches.cancel(batch.id)
    assert cancelling.status in ("cancelling", "cancelled")
    assert cancelling.cancelling_at
    ended = served.ended(batch.id)
    assert ended.status == "cancelled"
    assert ended.cancelled_at
    assert ended.request_counts is not None
    assert ended.request_counts.model_dump() == {"total": 16, "completed": 8, "failed": 0}
    assert {each["custom_id"] for each in served.lines_of(ended.output_file_id)} == {f"line-{n}" for n in range(8)}
    left = served.lines_of(ended.error_file_id)
    assert {each["custom_id"] for each in left} == {f"line-{number}" for number in range(8, 16)}
    assert {each["error"]["code"] for each in left} == {"batch_cancelled"}
    assert {each["response"] for each in left} == {None}
    eventually(lambda: served.wordy.parrot.cancelled >= before + 4)


def test_expired_in_the_middle(tmp_path: Path) -> None:
    with batches_served(tmp_path) as served:
        batch = served.begin([line(0), line(1, "FOREVER"), line(2, "FOREVER")])
        eventually(lambda: (counts := served.batch(batch.id).request_counts) is not None and counts.completed == 1)
        served.clock.advance(86_399)
        assert served.batch(batch.id).status == "in_progress"
        served.clock.advance(2)
        ended = served.ended(batch.id)
        assert ended.status == "expired"
        assert ended.expired_at == batch.created_at + 86_401
        assert [each["custom_id"] for each in served.lines_of(ended.output_file_id)] == ["line-0"]
        left = served.lines_of(ended.error_file_id)
        assert sorted(each["custom_id"] for each in left) == ["line-1", "line-2"]
        assert {each["error"]["code"] for each in left} == {"batch_expired"}
