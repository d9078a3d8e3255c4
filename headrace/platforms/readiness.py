# SPDX-License-Identifier: Apache-2.0
"""Waits until a service is ready to answer: GET {url}/api/v1/health/readiness. Called by `launcher`.

The type of the error decides, not the status code: services differ in the codes that they answer while they load. Between
two questions the platform is asked whether the service still runs at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import DeadlineExceeded, FailedPrecondition
from headrace.core.telemetry.progress import Progress, Reporter, silent
from headrace.platforms.contract import Observed
from headrace.platforms.http_asking import Told, get

PATH = "/api/v1/health/readiness"
HOPELESS = {"initialization_error": "its initialisation failed", "model_load_error": "its model could not be loaded"}
"""Types of errors after which a service will never be ready."""
_WORDS = {
    "server_initializing": "initialising",
    "model_loading": "loading the model",
    "model_not_ready": "not ready yet",
}
_LOOK_SECONDS = 2.0
"""The platform is asked no more often: for some that is a program over ssh."""

Step = Literal["ready", "waiting", "hopeless"]
Ask = Callable[[str, str, float], Awaitable[Told | None]]
Look = Callable[[], Awaitable[Observed]]


@dataclass(frozen=True, slots=True)
class Patience:
    """How often and how long is asked."""

    total_seconds: float = 600.0
    try_seconds: float = 5.0
    first_seconds: float = 0.1
    """Until the second question; each pause after it is half as long again, ..."""
    longest_seconds: float = 2.0
    """... up to this. TAO's own scripts wait for 10 s each time; a question costs next to nothing."""


class NeverReady(FailedPrecondition):
    """Raise when a service has failed for good; its log has more."""


def judged(told: Told | None) -> tuple[Step, str]:
    """What an answer means, and in words. No answer: not there yet."""
    if told is None:
        return "waiting", "waiting for the service to answer"
    if told.status == 200:
        return "ready", ""
    kind = told.error_type
    if kind in HOPELESS:
        return "hopeless", f"{HOPELESS[kind]}: {told.message}" if told.message else HOPELESS[kind]
    return "waiting", told.message or _WORDS.get(kind, "not ready yet")


async def wait_ready(
    url: str,
    name: str,
    look: Look | None = None,
    *,
    patience: Patience | None = None,
    progress: Progress = silent,
    ask: Ask = get,
    clock: Clock | None = None,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Return when it is ready. `name` is for people; `look` asks the platform how the service is.

    Raises NeverReady when it has failed or does not run any more, DeadlineExceeded when the time is over.
    """
    bounds = patience or Patience()
    clock = clock or SystemClock()
    began = clock.monotonic()
    looked = began
    wait = bounds.first_seconds
    with Reporter(progress, clock, name, unit="seconds") as reporter:
        while True:
            step, words = judged(await ask(url, PATH, bounds.try_seconds))
            now = clock.monotonic()
            if step == "ready":
                reporter.finish("ready")
                return
            if step == "hopeless":
                raise NeverReady(f"{name} will not be ready: {words}")
            if look is not None and (now - looked >= _LOOK_SECONDS or wait == bounds.first_seconds):
                looked = now
                _check_runs(await look(), name)
            left = began + bounds.total_seconds - now
            if left <= 0:
                raise DeadlineExceeded(
                    f"{name} is not ready after {bounds.total_seconds:g} s ({words}); it runs on: "
                    "look at its log, or wait longer"
                )
            reporter.update(done=now - began, message=words)
            await pause(min(wait, left))
            wait = min(wait * 1.5, bounds.longest_seconds)


def _check_runs(observed: Observed, name: str) -> None:
    if observed.phase in ("ended", "gone"):
        reason = observed.reason or (
            "the platform does not know it any more" if observed.phase == "gone" else "it ended"
        )
        raise NeverReady(f"{name} does not run any more: {reason}")
