# SPDX-License-Identifier: Apache-2.0
"""From a configuration to a version that serves: instances, warm-ups, labels; and nothing left open when it fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from headrace.backends.contract import ModelFiles, Placement
from headrace.core.clock import SystemClock
from headrace.core.dtypes import BF16, BOOL, BYTES, DTYPES, FP32, INT64, encode_bytes_elements
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument
from headrace.core.telemetry.metrics import Registry
from headrace.core.telemetry.progress import ProgressEvent, Reporter
from headrace.engine import model_loader
from headrace.engine.labels import read_labels
from headrace.engine.model_loader import ModelLoader, placements_of
from headrace.engine.scheduling.dynamic_batcher import AutoDelay
from headrace.engine.scheduling.rate_limiter import RateLimiter
from headrace.engine.services import ModelServices
from headrace.models.config.types import (
    DynamicBatching,
    InputSpec,
    InstanceGroup,
    ModelConfig,
    OutputSpec,
    Resource,
    Warmup,
    WarmupInput,
)
from support.engines import Recorder, array_of, config_of, counted, serving_plane, submit
from support.waiting import eventually_async


class RecordingBackend:
    """A backend, its model and its instances: writes down what is done to them, in which kind of thread."""

    def __init__(self, fails: str = "", compute: Callable[[Any], Any] = lambda inputs: inputs) -> None:
        self.lines: list[str] = []
        self.threads: set[str] = set()
        self.events: list[ProgressEvent] = []
        self.received: list[Any] = []
        self.hold = threading.Event()
        self.hold.set()
        self.opening = threading.Event()
        self._fails = fails
        self._compute = compute

    def note(self, line: str) -> None:
        self.lines.append(line)
        self.threads.add(threading.current_thread().name.split("_")[0])
        if line == self._fails:
            raise InvalidArgument(f"failed to {line}")

    def load(self, config: Any, files: Any, services: Any) -> RecordingBackend:
        self.note("load")
        return self

    def open(self, placement: Placement) -> NotedInstance:
        self.opening.set()
        self.hold.wait(100)
        self.note(f"open {placement.name}")
        return NotedInstance(self, placement.name)

    def close(self) -> None:
        self.note("close model")

    async def opened(self, config: ModelConfig, folder: Path = Path()) -> Any:
        services = ModelServices(Registry(SystemClock()))
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as pool:
            loader = ModelLoader(services, pool, cache=None, limiter=RateLimiter({"R": 1}))
            with patch.object(model_loader, "backend_named", lambda _: self):
                reporter = Reporter(self.events.append, SystemClock(), "m", every_seconds=0)
                try:
                    return await loader.load(config, ModelFiles(folder, 3, folder / "3"), reporter)
                finally:
                    self.hold.set()


class NotedInstance:
    def __init__(self, book: RecordingBackend, name: str) -> None:
        self._book = book
        self._name = name

    def compute(self, inputs: Any, wanted: Any) -> Any:
        self._book.received.append(inputs)
        return self._book._compute({"OUTPUT0": inputs["INPUT0"]})

    def close(self) -> None:
        self._book.note(f"close {self._name}")


TWO: dict[str, Any] = {"instance_groups": (InstanceGroup("g", count=2, runs="inline"),)}


def test_instances_are_opened_in_loader_threads_and_closed_before_their_model() -> None:
    async def main() -> None:
        book = RecordingBackend()
        version = await book.opened(config_of("m", **TWO))
        assert book.lines == ["load", "open g_0_cpu", "open g_1_cpu"]
        assert book.threads == {"loader"}
        assert (version.name, version.version, version.version_text) == ("m", 3, "3")
        assert (book.events[-1].done, book.events[-1].total) == (3, 3)
        await version.retire(0)
        assert sorted(book.lines[3:5]) == ["close g_0_cpu", "close g_1_cpu"]
        assert book.lines[5:] == ["close model"]
        assert "MainThread" not in book.threads

    asyncio.run(main())


@pytest.mark.parametrize("fails", ["load", "open g_0_cpu", "open g_1_cpu"])
def test_what_was_opened_before_a_failure_is_closed(fails: str) -> None:
    book = RecordingBackend(fails)
    with pytest.raises(InvalidArgument, match=f"failed to {fails}"):
        asyncio.run(book.opened(config_of("m", **TWO)))
    opened = [line for line in book.lines if line.startswith("open") and line != fails]
    closed = [line for line in book.lines if line.startswith("close g")]
    assert sorted(closed) == sorted(line.replace("open", "close") for line in opened)
    assert ("close model" in book.lines) == (fails != "load")


def test_a_failure_to_close_does_not_keep_the_rest_open(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        book = RecordingBackend("close g_0_cpu")
        version = await book.opened(config_of("m", **TWO))
        await version.retire(0)
        assert book.lines[-1] == "close model"
        assert "close g_1_cpu" in book.lines

    asyncio.run(main())
    assert [record.message for record in caplog.records] == ["Closing a model failed."]


def test_a_cancelled_opening_closes_what_was_being_opened() -> None:
    async def main() -> None:
        book = RecordingBackend()
        book.hold.clear()
        task = asyncio.create_task(book.opened(config_of("m", **TWO)))
        await eventually_async(lambda: book.opening.is_set())
        task.cancel()
        await asyncio.sleep(0)
        book.hold.set()
        with pytest.raises(asyncio.CancelledError):
            await task

        def all_closed() -> bool:
            opened = [line for line in book.lines if line.startswith("open")]
            closed = [line for line in book.lines if line.startswith("close g")]
            return len(opened) == len(closed) and "close model" in book.lines

        await eventually_async(all_closed)

    asyncio.run(main())


def test_an_instance_that_could_never_run_is_not_served() -> None:
    book = RecordingBackend()
    group = InstanceGroup("g", resources=(Resource("R", 2, is_global=True),))
    with pytest.raises(InvalidArgument, match="--rate-limit-resource=R:2"):
        asyncio.run(book.opened(config_of("m", instance_groups=(group,))))
    assert book.lines[-1] == "close model"


def test_where_instances_are_placed() -> None:
    config = config_of(
        "m",
        instance_groups=(
            InstanceGroup("c", count=2),
            InstanceGroup("g", "gpu", count=2, gpus=(0, 3)),
            InstanceGroup("k", "model"),
        ),
    )
    placements = [placement for _, placement in placements_of(config)]
    assert [placement.name for placement in placements] == [
        "c_0_cpu",
        "c_1_cpu",
        "g_0_gpu0",
        "g_0_gpu3",
        "g_1_gpu0",
        "g_1_gpu3",
        "k_0_model",
    ]
    assert [(placement.kind, placement.device) for placement in placements[2:4]] == [("gpu", 0), ("gpu", 3)]
    with pytest.raises(InvalidArgument, match="model 'm' has no instances"):
        placements_of(config_of("m", instance_groups=()))


def test_the_delay_is_the_configured_one() -> None:
    async def main() -> None:
        async with serving_plane(
            [
                (config_of("fixed", scheduling=DynamicBatching((), 1500)), Recorder()),
                (config_of("none", scheduling=None), Recorder()),
                (config_of("auto", scheduling=DynamicBatching(auto_delay=True, latency_target_ms=20)), Recorder()),
            ]
        ) as plane:
            assert plane.statistics("fixed")[0].delay.nanoseconds == 1_500_000
            assert plane.statistics("none")[0].delay.nanoseconds == 0
            auto = plane.statistics("auto")[0].delay
            assert isinstance(auto, AutoDelay)
            for number in range(100):
                await submit(plane, "auto", INPUT0=np.array([[number]])).answer()
            assert auto.rows_per_second > 0

    asyncio.run(main())


# Warm-ups.


def warm(count: int = 1, batch: int = 2, **inputs: Any) -> tuple[Warmup, ...]:
    return (Warmup("first", batch, inputs, count),)


def test_every_instance_computes_the_warm_up_before_anyone_else() -> None:
    async def main() -> None:
        book = RecordingBackend()
        warmups = warm(3, INPUT0=WarmupInput(FP32, (4,), "zero"))
        await book.opened(config_of("m", warmups=warmups, **TWO))
        assert [given["INPUT0"].shape for given in book.received] == [(2, 4)] * 6
        assert not any(given["INPUT0"].any() for given in book.received)
        assert any("warming up: first" in event.message for event in book.events)

    asyncio.run(main())


def test_warm_ups_are_not_counted() -> None:
    async def main() -> None:
        config = config_of("m", warmups=warm(INPUT0=WarmupInput(FP32, (4,), "zero")))
        async with serving_plane([(config, Recorder())]) as plane:
            statistics = counted(plane, "m")
            assert (statistics.executions, statistics.inferences, statistics.received) == (0, 0, 0)
            assert statistics.last_inference_ms == 0
            assert array_of(await submit(plane, "m", INPUT0=np.array([[5]])).answer()).item() == 5
            assert (statistics.executions, statistics.inferences) == (1, 1)

    asyncio.run(main())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("source", ["zero", "random"])
def test_warm_up_data_of_every_type(dtype: Any, source: Any) -> None:
    async def main() -> None:
        book = RecordingBackend()
        config = config_of(
            "m",
            warmups=warm(INPUT0=WarmupInput(dtype, (3, 2), source)),
            inputs=(InputSpec("INPUT0", dtype, (3, 2)),),
            outputs=(OutputSpec("OUTPUT0", dtype, (3, 2)),),
        )
        await book.opened(config)
        (given,) = book.received
        assert given["INPUT0"].shape == (2, 3, 2)
        assert given["INPUT0"].dtype == dtype.numpy
        if source == "random" and dtype not in (BYTES, BF16):
            assert len(np.unique(given["INPUT0"])) > (1 if dtype is BOOL else 2)

    asyncio.run(main())


def test_warm_up_data_from_a_file(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "warmup").mkdir()
        (tmp_path / "warmup" / "numbers").write_bytes(np.array([7, 8], np.int64).tobytes())
        (tmp_path / "warmup" / "words").write_bytes(encode_bytes_elements([b"a", b"bc"]))
        for dtype, name, expected in ((INT64, "numbers", [7, 8]), (BYTES, "words", [b"a", b"bc"])):
            for batch in (0, 8):
                book = RecordingBackend()
                warmups = warm(batch=2, INPUT0=WarmupInput(dtype, (2,), "file", name))
                await book.opened(config_of("m", max_batch_size=batch, warmups=warmups), tmp_path)
                assert book.received[0]["INPUT0"].tolist() == ([expected] * 2 if batch else expected)

    asyncio.run(main())


def test_a_warm_up_that_fails_is_a_model_that_is_not_served(tmp_path: Path) -> None:
    def refuse(_: Any) -> Any:
        raise InvalidArgument("I do not warm up")

    book = RecordingBackend(compute=refuse)
    warmups = warm(INPUT0=WarmupInput(FP32, (4,), "zero"))
    with pytest.raises(FailedPrecondition, match="^warm-up 'first' failed: I do not warm up$"):
        asyncio.run(book.opened(config_of("m", warmups=warmups)))
    assert book.lines[-1] == "close model"
    warmups = warm(INPUT0=WarmupInput(FP32, (4,), "file", "missing"))
    with pytest.raises(FailedPrecondition, match="missing: the warm-up data cannot be read"):
        asyncio.run(RecordingBackend().opened(config_of("m", warmups=warmups), tmp_path))
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "short").write_bytes(b"123")
    warmups = warm(INPUT0=WarmupInput(FP32, (4,), "file", "short"))
    with pytest.raises(HeadraceError):
        asyncio.run(RecordingBackend().opened(config_of("m", warmups=warmups), tmp_path))


# Labels.


def labelled(name: str) -> ModelConfig:
    return config_of("m", outputs=(OutputSpec("A", FP32, (2,), label_filename=name), OutputSpec("B", FP32, (2,))))


def test_labels_are_the_lines_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("cat\nd\u00f6g\n\nlast", encoding="utf-8")
    assert read_labels(labelled("labels.txt"), tmp_path) == {"A": ["cat", "d\u00f6g", "", "last"]}
    assert read_labels(labelled(""), tmp_path) == {}


def test_label_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match=r"labels.txt: the label file cannot be read \(No such file"):
        read_labels(labelled("labels.txt"), tmp_path)
    (tmp_path / "labels.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FailedPrecondition, match="labels.txt: the label file is not UTF-8 text"):
        read_labels(labelled("labels.txt"), tmp_path)
    with (tmp_path / "labels.txt").open("wb") as file:
        file.truncate(17 * 1024 * 1024)
    with pytest.raises(FailedPrecondition, match="bytes at most"):
        read_labels(labelled("labels.txt"), tmp_path)


def test_a_version_carries_its_labels(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    version = asyncio.run(RecordingBackend().opened(labelled("labels.txt"), tmp_path))
    assert version.labels == {"A": ["cat", "dog"]}
