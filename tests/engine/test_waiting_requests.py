# SPDX-License-Identifier: Apache-2.0
"""Requests that wait in the data plane for a model that loads on demand: answered once, cancelled, refused, sent on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.dtypes import FP32
from headrace.core.errors import Cancelled, InvalidArgument, NotFound, Unavailable
from headrace.core.requests import InferRequest, InferResponse
from headrace.core.tensors import Tensor
from headrace.engine.dataplane import BackgroundPlane, DataPlane
from headrace.engine.engine import EngineSettings, open_engine
from headrace.engine.repository.settings import RepositorySettings
from support.tiny_models import CONFIG, write_models

ROW = np.arange(4, dtype=np.float32).reshape(1, 4)


def request(name: str = "m", version: str = "", width: int = 4) -> InferRequest:
    array = np.zeros((1, width), np.float32) if width != 4 else ROW
    return InferRequest(name, [Tensor("INPUT0", FP32, array)], version, "seven")


def run(tmp_path: Path, test: Callable[[DataPlane], Awaitable[None]]) -> None:
    async def main() -> None:
        models = write_models(tmp_path / "models", {"m": {"config.pbtxt": CONFIG}, "bad": {"config.pbtxt": "wrong"}})
        settings = RepositorySettings(mode="on-demand", exit_on_error=False, poll_seconds=0)
        engine = open_engine(EngineSettings((models,), settings))
        await engine.start()
        try:
            await test(engine.plane)
        finally:
            await engine.close(5)

    asyncio.run(main())


async def until(check: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not check():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("background", [False, True])
def test_a_request_is_sent_on_when_its_model_serves(tmp_path: Path, background: bool) -> None:
    async def test(plane: DataPlane) -> None:
        used = BackgroundPlane(plane) if background else plane
        assert plane.model_names() == []
        assert plane.known_names() == ["m"]
        assert used.answer(request()) is None
        results: list[Any] = []
        waits: list[float] = []
        pending = used.infer(request(), results.append)
        assert pending.waits_for_model
        pending.on_loaded = waits.append  # type: ignore[attr-defined]
        await until(lambda: results)
        (response,) = results
        assert isinstance(response, InferResponse)
        assert (response.model_version, response.id) == ("1", "seven")
        assert len(waits) == 1
        pending.cancel()
        assert len(results) == 1
        assert not used.infer(request(), results.append).waits_for_model
        await until(lambda: len(results) == 2)

    run(tmp_path, test)


def test_a_stream_is_sent_on_too(tmp_path: Path) -> None:
    async def test(plane: DataPlane) -> None:
        results: list[Any] = []
        plane.infer_stream(request(), lambda result, final: results.append((result, final)))
        await until(lambda: results)
        assert [(type(result), final) for result, final in results] == [(InferResponse, True)]

    run(tmp_path, test)


def test_a_cancelled_request_is_answered_once_and_the_load_goes_on(tmp_path: Path) -> None:
    async def test(plane: DataPlane) -> None:
        results: list[Any] = []
        pending = plane.infer(request(), results.append)
        stream = plane.infer_stream(request(), lambda result, final: results.append(result))
        pending.cancel()
        stream.cancel()
        assert [type(result) for result in results] == [Cancelled, Cancelled]
        await until(lambda: plane.model_names() == ["m"])
        assert len(results) == 2

    run(tmp_path, test)


def test_errors_of_a_request_come_after_the_load(tmp_path: Path) -> None:
    async def test(plane: DataPlane) -> None:
        results: list[Any] = []
        plane.infer(request(width=3), results.append)
        await until(lambda: results)
        assert isinstance(results[0], InvalidArgument)
        with pytest.raises(NotFound):
            plane.infer(request("nope"), results.append)
        with pytest.raises(NotFound, match="version 9 is not found"):
            plane.infer(request(version="9"), results.append)
        plane.infer(request("bad"), results.append)
        await until(lambda: len(results) == 2)
        assert "bad/config.pbtxt" in results[1].message
        with pytest.raises(Unavailable, match="could not be loaded"):
            plane.infer(request("bad"), results.append)
        plane.accepting = False
        with pytest.raises(Unavailable, match="stopping"):
            plane.infer(request("bad"), results.append)

    run(tmp_path, test)


def test_a_use_is_seen_without_being_recorded(tmp_path: Path) -> None:
    async def test(plane: DataPlane) -> None:
        results: list[Any] = []
        plane.infer(request(), results.append)
        await until(lambda: results)
        version = plane.find("m")
        assert version is not None
        first = version.last_used_ns
        assert first > 0
        assert not version.in_use
        plane.infer(request(), results.append)
        assert version.in_use
        await until(lambda: len(results) == 2)
        assert version.last_used_ns > first

    run(tmp_path, test)
