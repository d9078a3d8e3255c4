# SPDX-License-Identifier: Apache-2.0
"""Batches that outlive their server, and those that several processes share: each line once in the results."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from openai_batch_server import POLL_SECONDS, Served, batches_served, jsonl, line
from openai_server import EchoModel

from headrace.api.openai.batch_store import BatchStore
from headrace.api.openai.file_store import FileStore
from headrace.core.clock import ManualClock
from headrace.core.errors import Unavailable
from headrace.core.limits import BatchLimits
from headrace.jobs.batch.ledger import FailedOutput
from headrace.jobs.batch.sources import Item
from headrace.jobs.openai_batches import batch_run
from headrace.jobs.openai_batches.line_client import LineClient
from headrace.jobs.openai_batches.worker import BatchWorker
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON, ResponseHead
from support.ports import free_port
from support.programs import Program
from support.virtual_time import LoopClock, run_virtual
from support.waiting import eventually


def completed(served: Served, id: str) -> int:
    counts = served.batch(id).request_counts
    return counts.completed if counts is not None else 0


@contextmanager
def busy_from(monkeypatch: pytest.MonkeyPatch, word: str) -> Iterator[None]:
    """The model is not ready for lines with a word."""
    execute = EchoModel.execute

    def refuse(repeater: EchoModel, batch: Any, finished: Callable[[], None]) -> None:
        for work in batch:
            if word in str(work.request.generation.messages):
                asyncio.get_running_loop().call_soon(work.reply, Unavailable("the model is loading"))
            else:
                execute(repeater, [work], lambda: None)
        finished()

    with monkeypatch.context() as patch:
        patch.setattr(EchoModel, "execute", refuse)
        yield


def test_a_batch_goes_on_after_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "_GRACE_SECONDS", 0.05)
    lines = [*(line(number) for number in range(20)), *(line(20 + number, "LATER") for number in range(20))]
    lines[3] = line(3, temperature=9)
    with busy_from(monkeypatch, "LATER"), batches_served(tmp_path) as served:
        batch = served.begin(lines)
        eventually(lambda: completed(served, batch.id) == 19)
        given = len(served.openai_server.repeater.received)
        served.stop()
        assert served.batch(batch.id).status == "in_progress", "any server still answers for it"
    clock = ManualClock()
    clock.advance(100)
    with batches_served(tmp_path, clock=clock) as served:
        ended = served.ended(batch.id)
        assert ended.status == "completed"
        assert ended.request_counts is not None
        assert ended.request_counts.model_dump() == {"total": 40, "completed": 39, "failed": 1}
        output, errors = served.lines_of(ended.output_file_id), served.lines_of(ended.error_file_id)
        assert Counter(each["custom_id"] for each in (*output, *errors)) == {f"line-{n}": 1 for n in range(40)}
        assert [error["custom_id"] for error in errors] == ["line-3"]
        assert len(served.openai_server.repeater.received) == 20, "the lines of the first server are not computed again"
        assert given == 19


def test_a_batch_that_expired_while_no_server_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with busy_from(monkeypatch, "LATER"):
        with batches_served(tmp_path) as served:
            batch = served.begin([line(0), line(1, "LATER")])
            eventually(lambda: completed(served, batch.id) == 1)
        clock = ManualClock()
        clock.advance(86_400)
        with batches_served(tmp_path, clock=clock) as served:
            ended = served.ended(batch.id)
            assert ended.status == "expired"
            assert len(served.lines_of(ended.output_file_id)) == len(served.lines_of(ended.error_file_id)) == 1


@pytest.mark.parametrize("status", ["validating", "in_progress"])
def test_a_batch_that_was_cancelled_while_no_server_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    with busy_from(monkeypatch, "LATER"), batches_served(tmp_path) as served:
        if status == "validating":
            monkeypatch.setattr(served.batches.worker, "_is_ready", lambda: False)
        batch = served.begin([line(0, "LATER")])
        eventually(lambda: served.batch(batch.id).status == status)
        served.stop()
        assert served.client().batches.cancel(batch.id).status == "cancelling"
    with batches_served(tmp_path) as served:
        ended = served.ended(batch.id)
        assert ended.status == "cancelled"
        left = served.lines_of(ended.error_file_id)
        assert [each["error"]["code"] for each in left] == ["batch_cancelled"] * (status == "in_progress")


@pytest.mark.parametrize("point", ["keep", "remove_work"])
def test_a_server_that_fails_while_it_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The result files are made again under the same ids, and there are no others."""
    with batches_served(tmp_path) as served, monkeypatch.context() as patch:

        def fail(*_arguments: Any, **_more: Any) -> None:
            raise RuntimeError("the process is gone")

        real = FileStore.keep

        def keep_then_fail(*arguments: Any, **more: Any) -> Any:
            record = real(*arguments, **more)
            if record["purpose"] == "batch_output":
                fail()
            return record

        if point == "keep":
            patch.setattr(FileStore, "keep", keep_then_fail)
        else:
            patch.setattr(BatchStore, "remove_work", fail)
        batch = served.begin([line(number) for number in range(5)])
        expected = "finalizing" if point == "keep" else "completed"
        eventually(lambda: served.batch(batch.id).status == expected)
        eventually(lambda: "has to wait" in caplog.text)
    with batches_served(tmp_path) as served:
        ended = served.ended(batch.id)
        assert ended.status == "completed"
        results = served.client().files.list(purpose="batch_output").data
        assert [result.id for result in results] == [ended.output_file_id]
        assert len(served.lines_of(ended.output_file_id)) == 5
        eventually(lambda: not list((tmp_path / "batches" / "work").iterdir()))


def test_one_of_several_processes_computes_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers, as processes have them: any answers, one computes, and the other takes over."""
    monkeypatch.setattr(batch_run, "_GRACE_SECONDS", 0.05)
    with batches_served(tmp_path) as first, batches_served(tmp_path) as second:
        batch = first.begin([*(line(number) for number in range(5)), line(5, "FOREVER")])
        eventually(lambda: completed(second, batch.id) == 5)
        computing, other = (first, second) if first.batches.worker._runs else (second, first)
        assert not other.batches.worker._runs
        assert not other.openai_server.repeater.received
        assert other.client().batches.list().data[0].id == batch.id
        computing.stop()
        eventually(lambda: other.openai_server.repeater.running)
        assert len(other.openai_server.repeater.received) == 1, "only what was left"
        assert computing.client().batches.cancel(batch.id).cancelling_at
        ended = computing.ended(batch.id)
        assert (ended.status, len(computing.lines_of(ended.output_file_id))) == ("cancelled", 5)


def test_abandoned_folders_are_removed(tmp_path: Path) -> None:
    limits, clock = BatchLimits(), ManualClock()
    files = FileStore(tmp_path / "files", limits, clock)
    store = BatchStore(tmp_path / "batches", files, limits, clock)
    young, old = store.work_folder("batch_" + "0" * 32), store.work_folder("batch_" + "1" * 32)
    young.mkdir(parents=True)
    old.mkdir()
    os.utime(old, (1, 1))
    assert store.unfinished() == []
    assert (young.exists(), old.exists()) == (True, False)


# A line


def handler_of(answers: list[int], seen: list[Exchange]) -> Callable[[Exchange], None]:
    def handle(exchange: Exchange) -> None:
        seen.append(exchange)
        if answers:
            status = answers.pop(0)
            exchange.respond(ResponseHead(status, []) if status != 200 else OK_JSON, [b'{"a"', b":1}"])

    return handle


def test_a_line_is_sent_again_while_there_is_no_room() -> None:
    clock, seen = LoopClock(), list[Exchange]()

    async def main() -> None:
        client = LineClient("/v1/responses", handler_of([503, 429, 200], seen), "ann", asyncio.Semaphore(1), 1)
        (outcome,) = await client.infer([Item(0, "a", {"model": "m"})])
        assert not isinstance(outcome, FailedOutput | Exception)
        assert outcome["status_code"] == 200
        assert json.loads(seen[0].body) == {"model": "m", "store": False}
        assert [each.caller for each in seen] == ["ann"] * 3
        assert len({each.head.get(b"x-request-id") for each in seen}) == 1
        started = clock.monotonic()
        client = LineClient("/v1/completions", handler_of([503] * 20, seen), "", asyncio.Semaphore(1), 1)
        (outcome,) = await client.infer([Item(0, "a", {"model": "m"})])
        assert isinstance(outcome, FailedOutput)
        assert outcome["status_code"] == 503
        assert 240 < clock.monotonic() - started < 400
        assert len(seen) == 3 + 10

    run_virtual(main(), clock)


@pytest.mark.parametrize("how", ["stop", "cancel", "task"])
def test_a_line_without_a_waiting_batch_ends(how: str) -> None:
    async def main() -> None:
        seen: list[Exchange] = []
        answers = [503] if how == "stop" else []
        client = LineClient("/v1/completions", handler_of(answers, seen), "", asyncio.Semaphore(1), 1)
        task = asyncio.create_task(client.infer([Item(0, "a", {})]))
        while not seen:
            await asyncio.sleep(0)
        gone: list[bool] = []
        seen[0].on_disconnect = lambda: gone.append(True)
        {"stop": client.stop, "cancel": client.cancel, "task": task.cancel}[how]()
        await asyncio.wait({task}, timeout=60)
        assert task.cancelled()
        assert gone == ([] if how == "stop" else [True])
        assert seen[0].closed
        seen[0].respond(OK_JSON, b"too late")

    asyncio.run(main())


# A process that is killed

EMBEDDING = """backend: "python"
max_batch_size: 4
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "embedding" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""
MODEL = """import time

import numpy as np


def predict(text_input):
    time.sleep(0.02)
    numbers = [int(row[0]) for row in text_input]
    return {"embedding": np.array([[number, -number] for number in numbers], np.float32)}
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_that_is_killed_again_and_again(tmp_path: Path, workers: int) -> None:
    """kill -9 at a time that nothing chooses, and at the worst points: before, in and after a write."""
    folder = tmp_path / "models" / "numbers"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(f'name: "numbers"\n{EMBEDDING}')
    (folder / "1" / "model.py").write_text(MODEL)
    count, state = 600, tmp_path / "state"
    lines = [
        {"custom_id": f"n{number}", "method": "POST", "url": "/v1/embeddings",
         "body": {"model": "numbers", "input": str(number)}}
        for number in range(count)
    ]  # fmt: skip
    options = ("--openai-state-dir", state, "--openai-batch-lines", "4", "--workers", str(workers))
    port = free_port()
    ports = ("--http-port", str(port), "--allow-grpc", "false", "--allow-metrics", "false")
    url = f"http://127.0.0.1:{port}/v1"
    faults = ["", "batch.ledger.append:die@5", "batch.ledger.appended:die@4", "files.replace:die@6", "SIGTERM"]
    batch_id = ""

    def done(client: OpenAI) -> int:
        counts = client.batches.retrieve(batch_id).request_counts
        return counts.completed if counts is not None else 0

    before = -1
    for fault in faults:
        environment = {"HEADRACE_FAULTS": fault if ":die" in fault else ""}
        program = Program(
            "serve", tmp_path / "models", *options, *ports, log=tmp_path / "log", env=environment,
            ready="ready: 1 model(s)", new_session=True,
        )  # fmt: skip
        program.start()
        try:
            with OpenAI(base_url=url, api_key="none", max_retries=9, timeout=60) as client:
                if not batch_id:
                    file_id = client.files.create(file=("n.jsonl", jsonl(lines)), purpose="batch").id
                    batch_id = client.batches.create(
                        input_file_id=file_id, endpoint="/v1/embeddings", completion_window="24h"
                    ).id
                if ":die" in fault and workers == 1:
                    program.process.wait(100)
                else:  # of several workers, one dies of the fault and is started again
                    enough = before + 40
                    eventually(lambda: done(client) > enough)  # noqa: B023
                    before = done(client)
            if fault == "SIGTERM":  # drained: no line is begun, and the record stays
                program.process.terminate()
                assert program.process.wait(100) == 0
        finally:
            if program.process.poll() is None:
                os.killpg(program.process.pid, signal.SIGKILL)
            program.process.wait(60)
    with Program(
        "serve", tmp_path / "models", *options, *ports, log=tmp_path / "log", ready="ready: 1 model(s)"
    ), OpenAI(base_url=url, api_key="none", timeout=60) as client:  # fmt: skip
        eventually(lambda: client.batches.retrieve(batch_id).status not in ("in_progress", "finalizing"))
        batch = client.batches.retrieve(batch_id)
        assert (batch.status, batch.error_file_id) == ("completed", None)
        results = [json.loads(line) for line in client.files.content(str(batch.output_file_id)).text.splitlines()]
        assert Counter(result["custom_id"] for result in results) == {f"n{number}": 1 for number in range(count)}
        for result in results:
            number = float(result["custom_id"][1:])
            assert result["response"]["body"]["data"][0]["embedding"] == [number, -number]
        assert len(client.files.list().data) == 2, "the input and the output"
    assert not list((state / "batches" / "batches" / "work").iterdir())


def test_the_worker_waits_after_an_error_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with batches_served(tmp_path) as served:
        begun: list[str] = []
        real = BatchWorker._start

        async def start(worker: BatchWorker, id: str, slots: asyncio.Semaphore) -> None:
            runs = len(worker._runs)
            await real(worker, id, slots)
            if len(worker._runs) > runs:
                begun.append(id)

        monkeypatch.setattr(BatchWorker, "_start", start)
        with monkeypatch.context() as patch:
            patch.setattr(batch_run, "check_input", lambda *_: (_ for _ in ()).throw(Unavailable("no space left")))
            batch = served.begin([line(0)])
            eventually(lambda: begun)
            eventually(lambda: not served.batches.worker._runs)
        for _ in range(3):
            served.openai_server.server.call(served.batches.worker.wake)
            served.openai_server.server.call(asyncio.sleep, 2 * POLL_SECONDS)
        assert (begun, served.batch(batch.id).status) == ([batch.id], "validating")
        served.clock.advance(61)
        assert served.ended(batch.id).status == "completed"


def test_missing_descriptors_are_logged_once_and_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[BatchStore] = []
    look = BatchStore.unfinished

    def unfinished(store: BatchStore) -> list[str]:
        if not store._folder.is_relative_to(tmp_path):  # that of a server which other tests share
            return look(store)
        looks.append(store)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "batches/work")

    with batches_served(tmp_path) as served:
        with caplog.at_level(logging.ERROR, "headrace.batch"), monkeypatch.context() as patch:
            patch.setattr(BatchStore, "unfinished", unfinished)
            eventually(lambda: len(looks) > 3)
        records = [record for record in caplog.records if record.name == "headrace.batch"]
        assert [record.getMessage() for record in records] == [
            "cannot poll the batches: [Errno 24] Too many open files: 'batches/work'"
        ]
        assert records[0].exc_info is None
        batch = served.begin([line(0)])
        assert served.ended(batch.id).status == "completed", "it looks again afterwards"
