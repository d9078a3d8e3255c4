# SPDX-License-Identifier: Apache-2.0
"""Trial loads: a child process loads a model from elsewhere first, so that a damaged file cannot end the server.

`load_context` asks for one before the server loads the version itself. The child is `engine/trial_process.py`. Its memory is
measured instead of limited by the kernel: libraries reserve far more address space than they use.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from headrace.backends.contract import ModelFiles
from headrace.backends.table import ISOLATED
from headrace.core.errors import Cancelled, FailedPrecondition, HeadraceError, ResourceExhausted, error_of
from headrace.core.exit_status import describe_exit
from headrace.core.machine import available_memory, control_groups, process_memory
from headrace.engine.repository.scan import Fingerprint
from headrace.engine.repository.settings import RepositorySettings
from headrace.models.storage.errors import readable_bytes

log = logging.getLogger("headrace.engine.repository")

_ROOT = Path(__file__).resolve().parents[3]
_PROCESS = Path(__file__).parents[1] / "trial_process.py"
_POLL_SECONDS = 0.05
_KEPT_FREE = 0.1
"""Part of the free memory that trials leave to the server and others."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One version that may have to be tried, and its files as they were scanned."""

    files: ModelFiles
    backend: str
    config_json: str | None
    """The configuration instead of the file in the folder."""
    fingerprints: tuple[Fingerprint | None, Fingerprint]
    from_request: bool
    """Whether the files came with a load request."""

    def __str__(self) -> str:
        return f"model '{self.files.model_folder.name}' version {self.files.version}"


class TrialLoads:
    """Decides which versions are tried, tries them, and remembers those that passed."""

    def __init__(self, settings: RepositorySettings) -> None:
        self._settings = settings
        self._passed: dict[ModelFiles, Trial] = {}

    def is_wanted(self, trial: Trial) -> bool:
        """Return whether a version has to be tried: not if it passed with the same files and configuration."""
        settings = self._settings
        if settings.trial_load == "never" or not trial.backend or trial.backend in ISOLATED:
            return False
        fetched = trial.from_request or trial.files.model_folder.parent in settings.fetched_repositories
        return (fetched or settings.trial_load == "always") and self._passed.get(trial.files) != trial

    def passed(self, trial: Trial) -> None:
        """Remember that a version can be loaded. Files of a request are in a new folder each time."""
        if not trial.from_request:
            self._passed[trial.files] = trial

    def run(self, trial: Trial, stop: Event) -> None:
        """Load a version in a child process. Blocks; raise what loading raised there, or why the child was ended.

        `stop` ends the child and raises `Cancelled`.
        """
        settings = self._settings
        request = {
            "folder": str(trial.files.model_folder),
            "version": trial.files.version,
            "config_json": trial.config_json,
            "gpus": settings.gpus,
            "strict": settings.strict_model_config,
        }
        log.info("trying %s in a process of its own", trial)
        memory = _MemoryBound(settings.trial_load_bytes)
        with subprocess.Popen(  # noqa: S603  # our own file
            [sys.executable, str(_PROCESS), str(os.getpid()), str(_ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            try:
                report = _report_of(process, json.dumps(request).encode(), trial, memory, stop)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # and what a library has started
        _check(trial, report, process.returncode)


class _MemoryBound:
    """The memory that a child may allocate."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._groups = control_groups()

    def excess(self, pid: int) -> str:
        """Return what the child has allocated and may allocate, if it is too much; else ""."""
        used = process_memory(pid)
        if self._limit_bytes:
            limit = self._limit_bytes
        else:
            free = available_memory(within=self._groups)
            if free is None:
                return ""
            limit = int((free + used) * (1 - _KEPT_FREE))
        return f"{readable_bytes(used)} of memory, and it may take {readable_bytes(limit)}" if used > limit else ""


def _report_of(
    process: subprocess.Popen[bytes], request: bytes, trial: Trial, memory: _MemoryBound, stop: Event
) -> bytes:
    """Wait for the report of a child; raise if it takes too much memory, or if it is to be stopped."""
    unsent: bytes | None = request
    while not stop.is_set():
        try:
            report, _ = process.communicate(unsent, timeout=_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            unsent = None
            excess = memory.excess(process.pid)
            if excess:
                raise ResourceExhausted(
                    f"the trial load of {trial} took {excess}: free memory, or allow more with --trial-load-bytes"
                ) from None
        else:
            return report
    raise Cancelled(f"the trial load of {trial} was stopped")


def _check(trial: Trial, report: bytes, code: int) -> None:
    """Raise the error of a report, or the error for a missing report."""
    try:
        error = json.loads(report)
    except ValueError:
        raise _exit_error(trial, code) from None
    if error:
        if error["log"]:
            log.error("the trial load of %s failed: %s", trial, error["log"])
        raise error_of(error["code"], error["message"])


def _exit_error(trial: Trial, code: int) -> HeadraceError:
    ended = f"the process of the trial load of {trial} ended ({describe_exit(code)})"
    if code == -signal.SIGKILL:
        return ResourceExhausted(
            f"{ended}, most likely by the kernel because memory ran out: free memory, or load it on a larger machine"
        )
    return FailedPrecondition(
        f"{ended}: a file of it is damaged, or the library that reads it has a fault; download or export it again, "
        "and see what the library wrote to the server's standard error"
    )
