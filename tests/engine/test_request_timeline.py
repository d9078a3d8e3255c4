# SPDX-License-Identifier: Apache-2.0
"""Timelines of requests: what they tell, with whom requests were computed, that they end, and that nobody else pays."""

from __future__ import annotations

import asyncio
import dis
from collections.abc import Mapping
from time import monotonic_ns
from typing import Any

import numpy as np
import pytest

from headrace.core.dtypes import FP32
from headrace.core.errors import InvalidArgument, NotFound, ResourceExhausted
from headrace.core.requests import InferRequest, InferResponse
from headrace.core.tensors import Tensor
from headrace.engine.dataplane import DataPlane
from headrace.engine.express import _express
from headrace.engine.scheduling.request_timeline import MAX_REQUEST_IDS
from headrace.engine.versions import ModelVersion
from headrace.models.config.types import DynamicBatching, InputSpec, ModelConfig, OutputSpec
from headrace.programs.console.request_timelines import RequestWatcher, WatchRequest, parse_watch_request
from support.engines import RecordingCaller, config_of, serving_plane
from support.waiting import eventually_async

ROW = np.arange(4, dtype=np.float32)


def config(name: str = "m", **more: Any) -> ModelConfig:
    settings: dict[str, Any] = {
        "max_batch_size": 8,
        "inputs": (InputSpec("INPUT0", FP32, (4,)),),
        "outputs": (OutputSpec("OUTPUT0", FP32, (4,)),),
        "scheduling": None,
    }
    return config_of(name, **{**settings, **more})


def doubled(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"OUTPUT0": inputs["INPUT0"] * 2}


def request(id: str = "", rows: int = 1, model: str = "m") -> InferRequest:
    return InferRequest(model, [Tensor.of("INPUT0", np.tile(ROW, (rows, 1)))], id=id)


async def send(plane: DataPlane, asked: InferRequest) -> InferResponse:
    """Compute a request; raises the error if that is its answer."""
    caller = RecordingCaller()
    plane.infer(asked, caller)
    result = await caller.answer()
    if isinstance(result, BaseException):
        raise result
    return result


def newest_first(watcher: RequestWatcher) -> list[dict[str, Any]]:
    """The newest first."""
    return sorted(watcher.document()["requests"].values(), key=lambda request: -request["number"])


def names(timeline: dict[str, Any]) -> list[str]:
    return [phase["name"] for phase in timeline["phases"]]


def run(test: Any) -> None:
    asyncio.run(test())


def version_of(plane: DataPlane) -> ModelVersion:
    version = plane.find("m")
    assert isinstance(version, ModelVersion)
    return version


def test_a_timeline_has_every_phase_in_order() -> None:
    async def main() -> None:
        async with serving_plane([(config(), doubled)]) as plane:
            received: dict[int, int] = {}
            watcher = RequestWatcher(plane, lambda asked: received.get(id(asked)))
            watcher.start(WatchRequest("m", 2))
            asked = request("first")
            received[id(asked)] = monotonic_ns()
            await send(plane, asked)
            (told,) = newest_first(watcher)
            assert (told["id"], told["model"], told["version"], told["rows"]) == ("first", "m", "1", 1)
            assert (told["outcome"], told["answers"]) == ("ok", 1)
            assert names(told)[:2] == ["decoded", "queued"]
            assert names(told)[-1] == "encoded and sent" and "computed" in names(told)
            ends = [phase["end_us"] for phase in told["phases"]]
            assert ends == sorted(ends) and ends[-1] == told["total_us"]
            assert [phase["start_us"] for phase in told["phases"]] == [0.0, *ends[:-1]]
            assert told["batch"]["reason"] == "one at a time" and told["batch"]["with"] == []

    run(main)


def test_the_batch_lists_unwatched_requests_too() -> None:
    batching = DynamicBatching(preferred_batch_sizes=(4,), max_queue_delay_microseconds=30_000_000)

    async def main() -> None:
        async with serving_plane([(config(scheduling=batching), doubled)]) as plane:
            watcher = RequestWatcher(plane)
            watcher.start(WatchRequest("m", 2))
            await asyncio.gather(
                *(send(plane, request(name, rows)) for name, rows in zip("abc", (1, 2, 1), strict=True))
            )
            second, first = newest_first(watcher)
            assert (first["id"], second["id"]) == ("a", "b")
            assert first["batch"]["reason"] == "preferred"
            assert (first["batch"]["requests"], first["batch"]["rows"]) == (3, 4)
            assert first["batch"]["with"] == [{"number": 2, "id": "b", "rows": 2}]
            assert second["batch"]["with"] == [{"number": 1, "id": "a", "rows": 1}]
            assert first["batch"]["others"] == 1

    run(main)


def test_it_ends_with_its_last_request_and_all_is_as_before() -> None:
    async def main() -> None:
        async with serving_plane([(config(), doubled)]) as plane:
            switched: list[bool] = []
            watcher = RequestWatcher(plane, switch=switched.append)
            version = version_of(plane)
            usual = (version.express, version.tracks_requests, version._special)
            assert usual[0] is not None and plane.answer(request()) is not None
            watcher.start(WatchRequest("m", 2))
            assert plane.answer(request()) is None  # the short way is too short to be watched
            await send(plane, request())
            assert watcher.document()["watching"]["m"]["left"] == 1
            await send(plane, request())
            assert watcher.document()["watching"] == {}
            assert (version.express, version.tracks_requests, version._special) == usual and version.recorder is None
            assert switched == [True, False]
            assert plane.answer(request()) is not None
            assert len(newest_first(watcher)) == 2

    run(main)


def test_it_ends_after_its_duration_or_when_stopped() -> None:
    async def main() -> None:
        async with serving_plane([(config(), doubled)]) as plane:
            watcher = RequestWatcher(plane, seconds=0.01)
            watcher.start(WatchRequest("m", 100))
            await eventually_async(lambda: not watcher.document()["watching"])
            assert version_of(plane).recorder is None
            watcher = RequestWatcher(plane)
            watcher.start(WatchRequest("m", 100))
            watcher.start(WatchRequest("m", 0))
            assert version_of(plane).recorder is None

    run(main)


def test_one_request_can_be_waited_for_by_its_id() -> None:
    async def main() -> None:
        async with serving_plane([(config(), doubled)]) as plane:
            watcher = RequestWatcher(plane)
            watcher.start(WatchRequest("m", id="mine"))
            for name in ("other", "mine", "mine"):
                await send(plane, request(name))
            assert [item["id"] for item in newest_first(watcher)] == ["mine"]
            for number in range(MAX_REQUEST_IDS):
                watcher.start(WatchRequest("m", id=f"{number}"))
            with pytest.raises(ResourceExhausted, match="try again in a minute"):
                watcher.start(WatchRequest("m", id="one more"))

    run(main)


def test_failures_and_refusals_are_recorded_too() -> None:
    def fails(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        raise RuntimeError("no")

    async def main() -> None:
        async with serving_plane([(config(), fails)]) as plane:
            watcher = RequestWatcher(plane)
            watcher.start(WatchRequest("m", 2))
            with pytest.raises(InvalidArgument):
                plane.infer(InferRequest("m", []), lambda _: None)
            with pytest.raises(Exception, match="model 'm' failed"):
                await send(plane, request())
            failed, refused = newest_first(watcher)
            assert (refused["outcome"], names(refused)) == ("InvalidArgument", ["checked"])
            assert failed["outcome"] == "Internal" and names(failed)[-1] == "encoded and sent"
            assert watcher.document()["watching"] == {}

    run(main)


def test_a_request_that_is_cancelled_in_the_queue_was_queued() -> None:
    batching = DynamicBatching(max_queue_delay_microseconds=30_000_000)

    async def main() -> None:
        async with serving_plane([(config(scheduling=batching), doubled)]) as plane:
            watcher = RequestWatcher(plane)
            watcher.start(WatchRequest("m", 1))
            pending = plane.infer(request(), lambda _: None)
            assert newest_first(watcher)[0]["outcome"] == ""
            pending.cancel()
            (told,) = newest_first(watcher)
            assert told["outcome"] == "Cancelled" and told["batch"] is None

    run(main)


def test_a_stream_is_watched_to_its_last_answer() -> None:
    async def main() -> None:
        async with serving_plane([(config(), doubled)]) as plane:
            watcher = RequestWatcher(plane)
            watcher.start(WatchRequest("m", 1))
            over = asyncio.Event()

            def answered(result: InferResponse | BaseException | None, final: bool) -> None:
                if final:
                    over.set()

            plane.infer_stream(request("s"), answered)
            await over.wait()
            (told,) = newest_first(watcher)
            assert (told["outcome"], told["answers"]) == ("ok", 1)

    run(main)


def test_a_version_that_retires_while_it_is_watched_gets_no_short_way_back() -> None:
    async def main() -> None:
        async with serving_plane([(config(), doubled)]) as plane:
            watcher = RequestWatcher(plane)
            watcher.start(WatchRequest("m", 5))
            version = version_of(plane)
            await version.retire(0)
            watcher.start(WatchRequest("m", 0))
            assert version.express is None and version.tracks_requests

    run(main)


def test_an_unknown_model_is_not_watched() -> None:
    async def main() -> None:
        async with serving_plane([(config(), doubled)]) as plane:
            with pytest.raises(NotFound):
                RequestWatcher(plane).start(WatchRequest("none", 5))

    run(main)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "name the model"),
        (b"[1]", "name the model"),
        (b'{"model": 1}', "name the model"),
        (b'{"model": "m", "requests": 201}', "to 200"),
        (b'{"model": "m", "requests": true}', "to 200"),
        (b'{"model": "m", "id": 5}', "'id' must be a text"),
        (b'{"model": "m", "count": 5}', "unknown field 'count'"),
    ],
)
def test_a_wrong_watch_request_is_refused(body: bytes, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        parse_watch_request(body)


def test_express_requests_are_not_recorded() -> None:
    """Nor does the way of a plain request to its queue: what is watched goes by checks that were there before."""

    def event_names(code: Any) -> set[str]:
        inside = [co_const for co_const in code.co_consts if hasattr(co_const, "co_names")]
        return {*code.co_names, *code.co_freevars, *(word for item in inside for word in event_names(item))}

    for function in (_express, DataPlane.answer, DataPlane.infer, ModelVersion.infer):
        assert not [word for word in event_names(function.__code__) if "recorder" in word], function
    loaded = [step.argval for step in dis.get_instructions(ModelVersion.infer) if step.opname == "LOAD_ATTR"]
    assert "recorder" not in loaded
