# SPDX-License-Identifier: Apache-2.0
"""The machine: CPUs, this process, and GPUs by a fake of NVIDIA's library, which this machine may not have."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from metrics_scrape import metrics_of, scrape

from headrace.api.metrics.hardware import CpuMeter, Gpus, Sampler, open_gpus, process_samples
from headrace.api.metrics.settings import MetricsSettings
from headrace.core.telemetry.metrics import Samples
from support.engines import builtin_plane
from support.waiting import eventually_async


def values(metrics: list[Samples]) -> dict[str, Any]:
    return {samples.name: samples.series for samples in metrics}


def proc(folder: Path, cpu: str, memory: str = "MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable: 30 kB\n") -> Path:
    (folder / "stat").write_text(f"cpu  {cpu}\ncpu0 1 2\nbtime 1000\n")
    (folder / "meminfo").write_text(memory)
    return folder


def test_cpu_use_between_two_samples(tmp_path: Path) -> None:
    meter = CpuMeter(proc(tmp_path, "100 0 100 700 100 0 0 0 0 0"))
    first = values(meter.read())
    assert first["nv_cpu_utilization"][""] == pytest.approx(0.2)
    assert first["nv_cpu_memory_total_bytes"][""] == 100 * 1024
    assert first["nv_cpu_memory_used_bytes"][""] == 70 * 1024
    proc(tmp_path, "150 5 115 720 110 0 0 0 0 0")
    assert values(meter.read())["nv_cpu_utilization"][""] == pytest.approx(0.7)
    assert values(meter.read())["nv_cpu_utilization"][""] == pytest.approx(0.7), "no time has passed"
    (tmp_path / "stat").unlink()
    assert "nv_cpu_utilization" not in values(meter.read())


@pytest.mark.parametrize(("cpu", "memory"), [("", ""), ("a b c", "MemTotal: x\n"), ("1", "MemTotal: 1 kB\n")])
def test_what_cannot_be_read_is_left_out(tmp_path: Path, cpu: str, memory: str) -> None:
    assert CpuMeter(proc(tmp_path, cpu, memory)).read() == []
    assert CpuMeter(tmp_path / "nowhere").read() == []


def test_this_process_has_the_values_of_psutil() -> None:
    results = {name: series[""] for name, series in values(process_samples()).items() if "" in series}
    process = psutil.Process()
    assert results["process_start_time_seconds"] == pytest.approx(process.create_time(), abs=2)
    assert results["process_resident_memory_bytes"] == pytest.approx(process.memory_info().rss, rel=0.1)
    assert results["process_virtual_memory_bytes"] == pytest.approx(process.memory_info().vms, rel=0.1)
    assert results["process_open_fds"] == pytest.approx(process.num_fds(), abs=2)
    assert results["process_max_fds"] == process.rlimit(psutil.RLIMIT_NOFILE)[0]
    assert 0 < results["process_cpu_seconds_total"] <= time.process_time()


def test_a_process_without_proc_reports_what_it_can(tmp_path: Path) -> None:
    names = {samples.name for samples in process_samples(tmp_path)}
    assert names == {"process_cpu_seconds_total", "python_gc_collections_total"}


class FakeNvmlError(Exception):
    """As the library's own."""


class FakeNvml:
    """A fake of `pynvml` with two GPUs, of which the second cannot tell its energy. Not the real library."""

    NVMLError = FakeNvmlError

    def __init__(self, *, driver: bool = True, uuids: tuple[str | bytes, ...] = ("GPU-aa", b"GPU-bb")) -> None:
        self.driver = driver
        self.uuids = uuids
        self.millijoules = 5_000_000
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.driver:
            raise FakeNvmlError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str | bytes:  # noqa: N802
        return self.uuids[handle]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=25 * (handle + 1), memory=99)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(total=80_000, used=1000 + handle, free=1)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        return 123_456

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:  # noqa: N802
        return 700_000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:  # noqa: N802
        if handle == 1:
            raise FakeNvmlError("Not Supported")
        return self.millijoules


def loaded(library: Any) -> Callable[[str], Any]:
    def load(name: str) -> Any:
        assert name == "pynvml"
        if isinstance(library, ImportError):
            raise library
        return library

    return load


def opened(library: FakeNvml) -> Gpus:
    gpus = open_gpus(2, loaded(library))
    assert gpus is not None
    return gpus


def test_gpus_in_prometheus_s_units() -> None:
    library = FakeNvml()
    gpus = opened(library)
    library.millijoules += 2500
    a, b = 'gpu_uuid="GPU-aa"', 'gpu_uuid="GPU-bb"'
    assert values(gpus.read()) == {
        "nv_gpu_utilization": {a: 0.25, b: 0.5},
        "nv_gpu_memory_total_bytes": {a: 80_000, b: 80_000},
        "nv_gpu_memory_used_bytes": {a: 1000, b: 1001},
        "nv_gpu_power_usage": {a: 123.456, b: 123.456},
        "nv_gpu_power_limit": {a: 700.0, b: 700.0},
        "nv_energy_consumption": {a: 2.5},  # since the start
    }
    gpus.close()
    assert library.open == 0


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ("GPU-aa", "GPU-bb")),
        ("1", ("GPU-bb",)),
        ("1,0", ("GPU-bb", "GPU-aa")),
        ("GPU-b", ("GPU-bb",)),
        ("0,-1,1", ("GPU-aa",)),
        ("7", ()),
        ("", ()),
    ],
)
def test_models_and_metrics_count_the_same_gpus(
    visible: str | None, uuids: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert opened(FakeNvml()).uuids == uuids


@pytest.mark.parametrize(
    ("library", "words"),
    [(ImportError("no module"), "headrace[gpu]"), (FakeNvml(driver=False), "Driver Not Loaded")],
)
def test_without_library_or_driver_one_line_says_why(
    library: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_gpus(1, loaded(library)) is None
    (record,) = caplog.records
    assert words in record.getMessage()


def test_without_a_gpu_nothing_is_loaded_or_logged(caplog: pytest.LogCaptureFixture) -> None:
    def load(name: str) -> Any:
        raise AssertionError("it was loaded")

    assert open_gpus(0, load) is None
    assert not caplog.records


def test_the_sampler_reads_in_its_own_thread_and_a_scrape_waits_for_the_first_sample() -> None:
    async def main() -> None:
        library = FakeNvml()
        looking, may_look = threading.Event(), threading.Event()

        def open_slowly() -> Gpus | None:
            looking.set()
            assert may_look.wait(30)
            return opened(library)

        before = set(threading.enumerate())  # a server that other tests share may have one, too
        settings = MetricsSettings(interval_ms=1)
        sampler = Sampler(settings, open_slowly)
        metrics = metrics_of(await builtin_plane(), settings, sampler=sampler)
        metrics.start()
        try:
            assert await asyncio.to_thread(looking.wait, 30)
            reported = asyncio.create_task(scrape(metrics))
            await asyncio.sleep(0.02)
            assert not reported.done()
            may_look.set()
            scraped = await reported
            assert scraped("nv_gpu_utilization", gpu_uuid="GPU-aa") == 0.25
            assert scraped("nv_cpu_memory_total_bytes") > scraped("nv_cpu_memory_used_bytes") > 0
            assert 0 <= scraped("nv_cpu_utilization") <= 1
            library.millijoules += 1000

            async def energy() -> Any:
                return (await scrape(metrics))("nv_energy_consumption")

            await eventually_async(energy)
        finally:
            metrics.close()
        assert library.open == 0
        left = set(threading.enumerate()) - before
        assert not [thread for thread in left if thread.name == "headrace-metrics"]

    asyncio.run(asyncio.wait_for(main(), 100))


def test_a_sampler_that_fails_costs_its_own_metrics_only(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        def broken() -> Gpus | None:
            raise RuntimeError("what was not foreseen")

        settings = MetricsSettings()
        metrics = metrics_of(await builtin_plane(), settings, sampler=Sampler(settings, broken))
        metrics.start()
        scraped = await scrape(metrics)
        metrics.close()
        assert scraped("process_cpu_seconds_total") > 0
        assert "nv_cpu_utilization" not in scraped.types

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert "GPU and CPU metrics stopped" in caplog.text


def test_disabled_metrics_are_not_collected() -> None:
    sampler = Sampler(MetricsSettings(gpu=False, cpu=False))
    sampler.start()
    assert sampler.is_ready
    sampler.wait_for_first()
    sampler.close()
    assert sampler.samples == ()
