# SPDX-License-Identifier: Apache-2.0
"""Metrics of the machine: GPUs (NVML), CPUs and memory (/proc), and this process.

`Sampler` reads GPUs and CPUs every few seconds in a thread of its own, because a driver call can take longer than a
scrape may, and a utilisation is a mean over an interval that must not depend on the scrapes. NVML needs the extra
`[gpu]` (`pynvml`). A number that cannot be read is left out. Names are Triton's for the machine and those of
Prometheus's clients for the process.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

from headrace.api.metrics.settings import MetricsSettings
from headrace.backends.devices import visible_gpus
from headrace.core.telemetry.metrics import Aggregation, Kind, Samples, labels_text

log = logging.getLogger("headrace.api")

_FIRST_SAMPLE_SECONDS = 5.0


_PROC = Path("/proc")

CPU: tuple[tuple[str, str, Aggregation], ...] = (
    ("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", "max"),
    ("nv_cpu_memory_total_bytes", "CPU total memory (RAM) in bytes", "max"),
    ("nv_cpu_memory_used_bytes", "CPU used memory (RAM) in bytes", "max"),
)
PROCESS: tuple[tuple[Kind, str, str, Aggregation], ...] = (
    ("counter", "process_cpu_seconds_total", "Total user and system CPU time spent in seconds", "sum"),
    ("gauge", "process_resident_memory_bytes", "Resident memory size in bytes", "sum"),
    ("gauge", "process_virtual_memory_bytes", "Virtual memory size in bytes", "sum"),
    ("gauge", "process_open_fds", "Number of open file descriptors", "sum"),
    ("gauge", "process_max_fds", "Maximum number of open file descriptors", "sum"),
    ("gauge", "process_start_time_seconds", "Start time of the process since unix epoch in seconds", "min"),
)
COLLECTIONS = ("python_gc_collections_total", "Number of times this generation was collected")


GPU: tuple[tuple[Kind, str, str], ...] = (
    ("gauge", "nv_gpu_utilization", "GPU utilization rate [0.0 - 1.0]"),
    ("gauge", "nv_gpu_memory_total_bytes", "GPU total memory, in bytes"),
    ("gauge", "nv_gpu_memory_used_bytes", "GPU used memory, in bytes"),
    ("gauge", "nv_gpu_power_usage", "GPU power usage in watts"),
    ("gauge", "nv_gpu_power_limit", "GPU power management limit in watts"),
    ("counter", "nv_energy_consumption", "GPU energy consumption in joules since the server started"),
)


class CpuMeter:
    """CPU utilisation since the last reading, or since boot for the first one."""

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc = proc
        self._last = (0, 0)
        self._utilization: float | None = None

    def read(self) -> list[Samples]:
        """Return the utilisation since the last call and the memory in use."""
        values: dict[str, float] = {}
        self._update_utilization()
        if self._utilization is not None:
            values["nv_cpu_utilization"] = self._utilization
        memory = self._memory()
        if memory is not None:
            values["nv_cpu_memory_total_bytes"], values["nv_cpu_memory_used_bytes"] = memory
        return [
            Samples("gauge", name, text, aggregation, {"": values[name]})
            for name, text, aggregation in CPU
            if name in values
        ]

    def _update_utilization(self) -> None:
        now = self._times()
        if now is None:
            self._utilization = None
        elif now[1] > self._last[1]:  # else keep it: the kernel counts in ticks, and readings may be closer together
            busy, total = now[0] - self._last[0], now[1] - self._last[1]
            self._utilization, self._last = min(1.0, max(0.0, busy / total)), now

    def _times(self) -> tuple[int, int] | None:
        """Return the busy ticks of the CPUs, and all ticks."""
        try:
            ticks = (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:9]
            user, nice, system, idle, waiting, *others = map(int, ticks)
        except (OSError, ValueError):
            return None
        busy = user + nice + system + sum(others)
        return busy, busy + idle + waiting

    def _memory(self) -> tuple[int, int] | None:
        try:
            lines = (self._proc / "meminfo").read_text().splitlines()
            sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
            total = sizes["MemTotal"]
            return total, total - sizes["MemAvailable"]
        except (OSError, ValueError, KeyError, IndexError):
            return None


def process_samples(proc: Path = _PROC) -> list[Samples]:
    """Return the metrics of this process."""
    values: dict[str, float] = {"process_cpu_seconds_total": time.process_time()}
    own = proc / "self"
    try:
        values["process_open_fds"] = len(os.listdir(own / "fd"))
        values["process_max_fds"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # The process name, in parentheses, may contain anything.
        fields = (own / "stat").read_text().rpartition(")")[2].split()
        values["process_virtual_memory_bytes"] = int(fields[20])
        values["process_resident_memory_bytes"] = int(fields[21]) * resource.getpagesize()
        started_ticks, booted = int(fields[19]), _boot_time(proc)
        values["process_start_time_seconds"] = booted + started_ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        pass
    samples = [
        Samples(kind, name, text, aggregation, {"": values[name]})
        for kind, name, text, aggregation in PROCESS
        if name in values
    ]
    collections = {f'generation="{n}"': stats["collections"] for n, stats in enumerate(gc.get_stats())}
    samples.append(Samples("counter", *COLLECTIONS, "sum", dict(collections)))
    return samples


def _boot_time(proc: Path) -> float:
    for line in (proc / "stat").read_text().splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    raise ValueError("no boot time")


def open_gpus(count: int | None = None, load: Callable[[str], Any] = importlib.import_module) -> Gpus | None:
    """Return the GPUs that models may use; None if there are none, or NVML cannot read them."""
    if not (visible_gpus() if count is None else count):
        return None
    try:
        library = load("pynvml")
    except ImportError:
        log.warning("no GPU metrics: NVIDIA's management library is missing: pip install 'headrace[gpu]'")
        return None
    try:
        library.nvmlInit()
        handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
        gpus = [(_text(library.nvmlDeviceGetUUID(handle)), handle) for handle in handles]
    except library.NVMLError as error:
        log.warning("no GPU metrics: the driver does not answer: %s", error)
        return None
    return Gpus(library, _visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES")))


class Gpus:
    """The GPUs, in the order in which models number them."""

    def __init__(self, library: Any, gpus: list[tuple[str, Any]]) -> None:
        self._library = library
        self._gpus = gpus
        self.uuids = tuple(uuid for uuid, _ in gpus)
        self._first_joules = {uuid: self._query(self._joules, handle) for uuid, handle in gpus}

    def read(self) -> list[Samples]:
        """Read all GPUs."""
        metrics = [Samples(kind, name, text, "max") for kind, name, text in GPU]
        for uuid, handle in self._gpus:
            labels = labels_text([("gpu_uuid", uuid)])
            for samples, value in zip(metrics, self._values(uuid, handle), strict=True):
                if value is not None:
                    samples.series[labels] = value
        return metrics

    def close(self) -> None:
        """Close NVML."""
        try:
            self._library.nvmlShutdown()
        except self._library.NVMLError as error:
            log.warning("cannot close NVML: %s", error)

    def _values(self, uuid: str, handle: Any) -> tuple[float | None, ...]:
        library = self._library
        memory = self._query(library.nvmlDeviceGetMemoryInfo, handle)
        joules, first = self._query(self._joules, handle), self._first_joules[uuid]
        return (
            self._query(lambda gpu: library.nvmlDeviceGetUtilizationRates(gpu).gpu / 100, handle),
            None if memory is None else int(memory.total),
            None if memory is None else int(memory.used),
            self._query(lambda gpu: library.nvmlDeviceGetPowerUsage(gpu) / 1000, handle),
            self._query(lambda gpu: library.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000, handle),
            None if joules is None or first is None else max(0.0, joules - first),
        )

    def _joules(self, handle: Any) -> float:
        return float(self._library.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000)

    def _query(self, function: Callable[[Any], Any], handle: Any) -> Any:
        try:
            return function(handle)
        except self._library.NVMLError:  # not all GPUs have all numbers, and one may fail while the others work
            return None


def _visible(gpus: list[tuple[str, Any]], named: str | None) -> list[tuple[str, Any]]:
    """Return the GPUs of CUDA_VISIBLE_DEVICES in its order, by which models number them.

    By default CUDA lists the fastest GPU first and NVML goes by the PCI bus: on a machine with different GPUs,
    CUDA_DEVICE_ORDER=PCI_BUS_ID makes them agree.
    """
    if named is None:
        return gpus
    chosen = []
    for entry in named.split(","):
        text = entry.strip()
        if text.isdecimal() and int(text) < len(gpus):
            chosen.append(gpus[int(text)])
        elif match := [gpu for gpu in gpus if text and gpu[0].startswith(text)]:
            chosen.append(match[0])
        else:
            break
    return chosen


def _text(uuid: str | bytes) -> str:
    return uuid.decode() if isinstance(uuid, bytes) else uuid


class Sampler:
    """Reads GPUs and CPUs in a thread and keeps the last samples."""

    def __init__(self, settings: MetricsSettings, open_gpus: Callable[[], Gpus | None] = open_gpus) -> None:
        self._settings = settings
        self._open_gpus = open_gpus
        self._stop = Event()
        self._first_sample = Event()
        self._thread: Thread | None = None
        self.samples: Sequence[Samples] = ()
        self.gpu_uuids: tuple[str, ...] = ()

    def start(self) -> None:
        """Start the thread, if GPUs or CPUs are to be read."""
        if self._thread is None and (self._settings.gpu or self._settings.cpu):
            self._thread = Thread(target=self._run, name="headrace-metrics", daemon=True)
            self._thread.start()

    def wait_for_first(self) -> None:
        """Block until the first samples are there: before that the UUIDs of the GPUs are unknown."""
        if self._thread is not None:
            self._first_sample.wait(_FIRST_SAMPLE_SECONDS)

    @property
    def is_ready(self) -> bool:
        """Whether the first samples are there, or there will be none."""
        return self._thread is None or self._first_sample.is_set()

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_FIRST_SAMPLE_SECONDS)

    def _run(self) -> None:
        gpus = None
        try:
            cpu = CpuMeter() if self._settings.cpu else None
            gpus = self._open_gpus() if self._settings.gpu else None
            self.gpu_uuids = gpus.uuids if gpus is not None else ()
            while True:
                self.samples = [*(gpus.read() if gpus is not None else ()), *(cpu.read() if cpu is not None else ())]
                self._first_sample.set()
                if self._stop.wait(self._settings.interval_ms / 1000):
                    return
        except Exception:
            log.exception("GPU and CPU metrics stopped")
            self.samples = ()
        finally:
            self._first_sample.set()
            if gpus is not None:
                gpus.close()
