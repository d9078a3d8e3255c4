# SPDX-License-Identifier: Apache-2.0
"""Looks at GPUs and CPUs every few seconds, in a thread of its own. Started and read by `http`.

A scrape gets what was seen last: asking a driver can take longer than anyone wants to wait for a scrape, and utilisation
is a mean over the time between two looks, which must not depend on who scrapes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from threading import Event, Thread

from headrace.api.metrics.gpus import Gpus, open_gpus
from headrace.api.metrics.machine import CpuMeter
from headrace.api.metrics.settings import MetricsSettings
from headrace.core.telemetry.samples import Samples

log = logging.getLogger("headrace.api")

_FIRST_LOOK_SECONDS = 5.0


class Sampler:
    """The thread, and what it saw last."""

    def __init__(self, settings: MetricsSettings, open_gpus: Callable[[], Gpus | None] = open_gpus) -> None:
        self._settings = settings
        self._open_gpus = open_gpus
        self._stop = Event()
        self._looked = Event()
        self._thread: Thread | None = None
        self.seen: Sequence[Samples] = ()
        self.gpu_uuids: tuple[str, ...] = ()

    def start(self) -> None:
        """Begin to look; without anything to look at, do nothing."""
        if self._thread is None and (self._settings.gpu or self._settings.cpu):
            self._thread = Thread(target=self._run, name="headrace-metrics", daemon=True)
            self._thread.start()

    def wait_for_first(self) -> None:
        """Return when the first look is over: until then it is not known which GPU is which. Blocks."""
        if self._thread is not None:
            self._looked.wait(_FIRST_LOOK_SECONDS)

    @property
    def looked(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._thread is None or self._looked.is_set()

    def close(self) -> None:
        """Look no more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_FIRST_LOOK_SECONDS)

    def _run(self) -> None:
        gpus = None
        try:
            cpu = CpuMeter() if self._settings.cpu else None
            gpus = self._open_gpus() if self._settings.gpu else None
            self.gpu_uuids = gpus.uuids if gpus is not None else ()
            while True:
                self.seen = [*(gpus.read() if gpus is not None else ()), *(cpu.read() if cpu is not None else ())]
                self._looked.set()
                if self._stop.wait(self._settings.interval_ms / 1000):
                    return
        except Exception:
            log.exception("GPUs and CPUs are not measured any more")
            self.seen = ()
        finally:
            self._looked.set()
            if gpus is not None:
                gpus.close()
