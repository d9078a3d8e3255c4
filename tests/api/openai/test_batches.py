# SPDX-License-Identifier: Apache-2.0
"""`/v1/files` and `/v1/batches` with OpenAI's own client: what a batch makes, and what may happen to it on the way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai_batch_server import CHAT, Served, batches_served, line

from headrace.core.limits import BatchLimits
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
    assert batch.model == ("letters" if endpoint == "/v1/embeddings" else "repeater")
    lines = served.lines_of(batch.output_file_id)
    assert sorted(line["custom_id"] for line in lines) == sorted(f"line-{number}" for number in range(30))
    assert all(line["error"] is None and line["id"].startswith("batch_req_") for line in lines)
    assert len({line["id"] for line in lines}) == 30
    response = next(line["response"] for line in lines if line["custom_id"] == "line-7")
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
    before = served.openai_server.repeater.cancelled
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
    eventually(lambda: served.openai_server.repeater.cancelled >= before + 4)


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


@pytest.mark.parametrize(
    ("lines", "errors"),
    [
        ([line(0), b"{", b"[]", line(1)], [("invalid_json_line", None, 2), ("invalid_json_line", None, 3)]),
        ([line(0), line(1), line(0)], [("duplicate_custom_id", "custom_id", 3)]),
        ([line(0, url="/v1/completions"), line(1)], [("url_mismatch", "url", 1)]),
        ([{**line(0), "method": "GET"}], [("invalid_method", "method", 1)]),
        ([{**line(0), "custom_id": 7}], [("invalid_request", "custom_id", 1)]),
        ([{**line(0), "custom_id": "x" * 513}], [("invalid_request", "custom_id", 1)]),
        ([{**line(0), "custom_id": ""}], [("missing_required_parameter", "custom_id", 1)]),
        ([{"custom_id": "a", "url": CHAT, "body": {}}], [("missing_required_parameter", "method", 1)]),
        ([{"custom_id": "a", "method": "POST", "body": {}}], [("missing_required_parameter", "url", 1)]),
        ([{**line(0), "body": None}], [("missing_required_parameter", "body", 1)]),
        ([{**line(0), "body": "text"}], [("invalid_request", "body", 1)]),
        ([line(0, stream=True)], [("invalid_request", "body.stream", 1)]),
        ([line(0, background=True)], [("invalid_request", "body.background", 1)]),
        ([b'{"custom_id":"a","method":"POST","url":"' + CHAT.encode() + b'","body":{"a":' + b"[" * 200 + b"]" * 200 + b"}}"],
         [("invalid_request", "body", 1)]),
        ([line(0, "long" * 300)], [("invalid_request", None, 1)]),
        ([b"", b"  "], [("empty_file", None, None)]),
        ([line(number) for number in range(101)], [("too_many_tasks", None, None)]),
    ],
)  # fmt: skip
def test_inputs_that_are_refused(tmp_path: Path, lines: list[Any], errors: list[Any]) -> None:
    with batches_served(tmp_path, limits=BatchLimits(lines=100, line_bytes=1000)) as served:
        batch = served.ended(served.begin(lines).id)
        assert batch.status == "failed"
        assert batch.failed_at
        assert batch.errors is not None and batch.errors.data is not None
        assert [(each.code, each.param, each.line) for each in batch.errors.data] == errors
        assert all(each.message for each in batch.errors.data)
        assert (batch.output_file_id, batch.error_file_id) == (None, None)
        assert served.openai_server.repeater.received == [], "nothing was computed"
        eventually(lambda: not (tmp_path / "batches" / "work" / batch.id).exists())


def test_the_largest_input_that_passes(tmp_path: Path) -> None:
    with batches_served(tmp_path, limits=BatchLimits(lines=100, line_bytes=1000)) as served:
        lines: list[Any] = [line(number) for number in range(99)]
        padding = 1000 - len(json.dumps(line(99, "x")))
        lines.append(b"\xef\xbb\xbf" + json.dumps(line(99, "x" + "x" * padding)).encode() + b"\r")
        served.clock.advance(1)
        batch = served.ended(served.begin([lines[-1], b"", *lines[:-1]]).id)
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 100, "completed": 100, "failed": 0}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input_file_id": None}, "input_file_id"),
        ({"input_file_id": "file-unknown"}, "input_file_id"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"completion_window": None}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a" * 65: "x"}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"metadata": []}, "metadata"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 2_592_001}}, "output_expires_after.seconds"),
        ({"output_expires_after": 3600}, "output_expires_after"),
    ],
)
def test_batches_that_are_refused(served: Served, change: dict[str, Any], param: str) -> None:
    body = {"input_file_id": served.upload([line(0)]), "endpoint": CHAT, "completion_window": "24h", **change}
    status, reply, _ = served.ask("/v1/batches", body)
    assert (status, reply["error"]["param"]) == (400, param)


def test_bodies_and_paths_that_are_refused(served: Served) -> None:
    for body in (b"", b"{", b"[]", b"\xff"):
        assert served.ask("/v1/batches", body)[0] == 400
    assert served.ask("/v1/batches/batch_unknown", None, "GET")[0] == 404
    assert served.ask("/v1/batches/..%2f..%2fx", None, "GET")[0] == 404
    assert served.ask("/v1/batches/batch_unknown/cancel", b"")[0] == 404
    assert served.ask("/v1/batches?limit=101", None, "GET")[0] == 400
    assert served.ask("/v1/batches/x", b"", "DELETE")[0] == 405
    assert served.ask("/v1/batches/x/cancel", None, "GET")[2]["allow"] == "POST"


def test_a_result_is_no_input(served: Served) -> None:
    batch = served.ended(served.begin([line(0)]).id)
    with pytest.raises(openai.BadRequestError, match="give a file for 'batch'"):
        served.client().batches.create(
            input_file_id=str(batch.output_file_id), endpoint="/v1/chat/completions", completion_window="24h"
        )
    with pytest.raises(openai.BadRequestError, match="the batch is completed"):
        served.client().batches.cancel(batch.id)


def test_results_of_an_age_of_their_own(served: Served) -> None:
    batch = served.begin([line(0)], output_expires_after={"anchor": "created_at", "seconds": 7200})
    output = served.client().files.retrieve(str(served.ended(batch.id).output_file_id))
    assert output.expires_at == output.created_at + 7200
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")


def test_pages_of_batches(tmp_path: Path) -> None:
    with batches_served(tmp_path) as served:
        ids = []
        for _ in range(3):
            ids.append(served.begin([line(0)]).id)
            served.clock.advance(1)
        assert [each.id for each in served.client().batches.list(limit=2)] == ids[::-1]


def test_a_finished_batch_is_forgotten_in_the_end(tmp_path: Path) -> None:
    with batches_served(tmp_path) as served:
        batch = served.ended(served.begin([line(0)]).id)
        served.clock.advance(29 * 86_400)
        served.openai_server.server.call(served.batches.worker.wake)
        assert served.batch(batch.id).status == "completed"
        served.clock.advance(2 * 86_400)
        served.openai_server.server.call(served.batches.worker.wake)
        eventually(lambda: served.ask(f"/v1/batches/{batch.id}", None, "GET")[0] == 404)


def test_bounds_of_batches(tmp_path: Path) -> None:
    with batches_served(tmp_path, limits=BatchLimits(key_batches=1, running_batches=1)) as served:
        first = served.begin([line(0, "FOREVER")])
        with pytest.raises(openai.BadRequestError, match="1 batches of this API key are not finished"):
            served.begin([line(0)])
        served.client().batches.cancel(first.id)
        served.ended(first.id)
        served.ended(served.begin([line(0)]).id)
        assert len(list((tmp_path / "batches" / "work").iterdir())) <= 1
    with batches_served(tmp_path, limits=BatchLimits(total_batches=2)) as served:
        with pytest.raises(openai.BadRequestError, match="keeps no more batches"):
            served.begin([line(0)])


def test_results_that_are_too_large(tmp_path: Path) -> None:
    with batches_served(tmp_path, limits=BatchLimits(output_bytes=100)) as served:
        batch = served.ended(served.begin([line(0), *(line(1 + number, "FOREVER") for number in range(9))]).id)
        assert batch.status == "failed"
        assert batch.errors is not None and batch.errors.data is not None
        assert batch.errors.data[0].code == "output_too_large"
        assert [each["custom_id"] for each in served.lines_of(batch.output_file_id)] == ["line-0"]
        assert len(served.lines_of(batch.error_file_id)) == 9


def test_an_input_that_is_deleted_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with batches_served(tmp_path) as served:
        monkeypatch.setattr(served.batches.worker, "_is_ready", lambda: False)
        batch = served.begin([line(number) for number in range(5)])
        served.client().files.delete(batch.input_file_id)
        monkeypatch.setattr(served.batches.worker, "_is_ready", lambda: True)
        ended = served.ended(batch.id)
        assert ended.request_counts is not None
        assert (ended.status, ended.request_counts.completed) == ("completed", 5)


def test_lines_are_for_the_background_and_keep_their_owner(served: Served) -> None:
    seen: list[bool] = []
    version = served.batches._plane.find("repeater")
    real = version._scheduler.add  # type: ignore[union-attr]
    version._scheduler.add = lambda pending: (seen.append(pending.request.is_background), real(pending))[1]  # type: ignore[union-attr,method-assign]
    try:
        served.ended(served.begin([line(number) for number in range(3)]).id)
        served.openai_server.chat("hello")
    finally:
        version._scheduler.add = real  # type: ignore[union-attr]
    assert seen == [True, True, True, False]
