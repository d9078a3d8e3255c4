# SPDX-License-Identifier: Apache-2.0
"""The channel between workers: questions, answers, errors, and who is not there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import Internal, NotFound, Unavailable
from headrace.programs.serve.worker_channel import WorkerChannel, WorkerTimeout, WorkerUnavailable, worker_folder
from support.async_tests import async_test


async def pair(folder: Path) -> tuple[WorkerChannel, WorkerChannel]:
    """Two of three workers; the third is dead."""
    created = WorkerChannel(folder, 0, 3), WorkerChannel(folder, 1, 3)
    for item in created:
        await item.start()
    return created


@async_test
async def test_questions_and_answers(tmp_path: Path) -> None:
    asking, asked = await pair(tmp_path)

    async def double(number: Any) -> Any:
        return {"twice": number * 2, "text": "x" * 300_000}

    asked.register_handler("double", double)
    answers = await asking.request_all("double", 21, seconds=30)
    assert answers[1] == {"twice": 42, "text": "x" * 300_000}
    assert isinstance(answers[2], WorkerUnavailable)
    assert asked.has_handler("double") and not asking.has_handler("double")
    await asking.close()
    await asked.close()


@async_test
async def test_errors_keep_their_kind_and_nothing_else_is_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asking, asked = await pair(tmp_path)

    async def missing(_: Any) -> Any:
        raise NotFound("there is no such thing")

    async def broken(_: Any) -> Any:
        raise RuntimeError("secret")

    asked.register_handler("missing", missing)
    asked.register_handler("broken", broken)
    with pytest.raises(NotFound, match="no such thing"):
        await asking.request(1, "missing", seconds=30)
    with pytest.raises(Internal) as error:
        await asking.request(1, "broken", seconds=30)
    assert "secret" not in error.value.message and "secret" in caplog.text
    with pytest.raises(Unavailable, match="worker 1 is starting"):
        await asking.request(1, "later", seconds=30)
    await asking.close()
    await asked.close()


@async_test
async def test_patience(tmp_path: Path) -> None:
    asking, asked = await pair(tmp_path)
    forever = asyncio.Event()

    async def wait(_: Any) -> None:
        await forever.wait()

    asked.register_handler("wait", wait)
    # It is there, which one that is dead is not: who starts now need not hurry to the ports.
    with pytest.raises(WorkerTimeout, match="worker 1 does not answer in time"):
        await asking.request(1, "wait", seconds=0.05)
    with pytest.raises(WorkerUnavailable) as dead:
        await asking.request(2, "wait", seconds=30)
    assert not isinstance(dead.value, WorkerTimeout)
    forever.set()
    await asking.close()
    await asked.close()


@async_test
async def test_who_takes_a_dead_workers_place_is_found(tmp_path: Path) -> None:
    asking, dead = await pair(tmp_path)
    # Killed: it leaves its socket behind.
    assert dead._server is not None
    dead._server.close()
    with pytest.raises(WorkerUnavailable):
        await asking.request(1, "who", seconds=30)
    successor = WorkerChannel(tmp_path, 1, 3)

    async def who(_: Any) -> str:
        return "the successor"

    successor.register_handler("who", who)
    await successor.start()
    assert await asking.request(1, "who", seconds=30) == "the successor"
    await asking.close()
    await successor.close()
    assert not list(tmp_path.glob("*.sock"))


def test_the_folder_is_for_this_user_alone() -> None:
    with worker_folder() as folder:
        assert Path(folder).stat().st_mode & 0o777 == 0o700
    assert not Path(folder).exists()
