# SPDX-License-Identifier: Apache-2.0
"""GPUs as NVIDIA's management library sees them. Opened and read by `sampler`, in its thread: the driver takes its time.

The library is the extra `[gpu]` (`pynvml`), imported only where there is a GPU. Without it, or without a driver, there
are no GPU metrics, and one line in the log says why. A number that a GPU cannot tell is left out.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

from headrace.backends.devices import visible_gpus
from headrace.core.telemetry.families import Kind
from headrace.core.telemetry.samples import Samples, labels_text

log = logging.getLogger("headrace.api")

GPU: tuple[tuple[Kind, str, str], ...] = (
    ("gauge", "nv_gpu_utilization", "GPU utilization rate [0.0 - 1.0]"),
    ("gauge", "nv_gpu_memory_total_bytes", "GPU total memory, in bytes"),
    ("gauge", "nv_gpu_memory_used_bytes", "GPU used memory, in bytes"),
    ("gauge", "nv_gpu_power_usage", "GPU power usage in watts"),
    ("gauge", "nv_gpu_power_limit", "GPU power management limit in watts"),
    ("counter", "nv_energy_consumption", "GPU energy consumption in joules since the server started"),
)


def open_gpus(count: int | None = None, load: Callable[[str], Any] = importlib.import_module) -> Gpus | None:
    """The GPUs that models may use; None if there are none, or none that can be asked."""
    if not (visible_gpus() if count is None else count):
        return None
    try:
        library = load("pynvml")
    except ImportError:
        log.warning("no GPU metrics: they need NVIDIA's management library: pip install 'headrace[gpu]'")
        return None
    try:
        library.nvmlInit()
        handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
        found = [(_text(library.nvmlDeviceGetUUID(handle)), handle) for handle in handles]
    except library.NVMLError as error:
        log.warning("no GPU metrics: the driver does not answer: %s", error)
        return None
    return Gpus(library, _visible(found, os.environ.get("CUDA_VISIBLE_DEVICES")))


class Gpus:
    """What was found, in the order in which models count them."""

    def __init__(self, library: Any, found: list[tuple[str, Any]]) -> None:
        self._library = library
        self._found = found
        self.uuids = tuple(uuid for uuid, _ in found)
        self._first_joules = {uuid: self._ask(self._joules, handle) for uuid, handle in found}

    def read(self) -> list[Samples]:
        """Ask all of them."""
        metrics = [Samples(kind, name, words, "max") for kind, name, words in GPU]
        for uuid, handle in self._found:
            labels = labels_text([("gpu_uuid", uuid)])
            for samples, value in zip(metrics, self._values(uuid, handle), strict=True):
                if value is not None:
                    samples.series[labels] = value
        return metrics

    def close(self) -> None:
        """Let go of the driver."""
        try:
            self._library.nvmlShutdown()
        except self._library.NVMLError as error:
            log.warning("the GPU driver could not be left: %s", error)

    def _values(self, uuid: str, handle: Any) -> tuple[float | None, ...]:
        library = self._library
        memory = self._ask(library.nvmlDeviceGetMemoryInfo, handle)
        joules, first = self._ask(self._joules, handle), self._first_joules[uuid]
        return (
            self._ask(lambda gpu: library.nvmlDeviceGetUtilizationRates(gpu).gpu / 100, handle),
            None if memory is None else int(memory.total),
            None if memory is None else int(memory.used),
            self._ask(lambda gpu: library.nvmlDeviceGetPowerUsage(gpu) / 1000, handle),
            self._ask(lambda gpu: library.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000, handle),
            None if joules is None or first is None else max(0.0, joules - first),
        )

    def _joules(self, handle: Any) -> float:
        return float(self._library.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000)

    def _ask(self, question: Callable[[Any], Any], handle: Any) -> Any:
        try:
            return question(handle)
        except self._library.NVMLError:  # not all GPUs can tell everything, and one may be lost while the others serve
            return None


def _visible(found: list[tuple[str, Any]], named: str | None) -> list[tuple[str, Any]]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order: models know GPUs by that number.

    CUDA counts the fastest first unless told otherwise, the driver by their place on the bus: where a machine has GPUs of
    several kinds, CUDA_DEVICE_ORDER=PCI_BUS_ID makes them agree.
    """
    if named is None:
        return found
    chosen = []
    for entry in named.split(","):
        text = entry.strip()
        if text.isdecimal() and int(text) < len(found):
            chosen.append(found[int(text)])
        elif match := [gpu for gpu in found if text and gpu[0].startswith(text)]:
            chosen.append(match[0])
        else:
            break
    return chosen


def _text(uuid: str | bytes) -> str:
    return uuid.decode() if isinstance(uuid, bytes) else uuid
