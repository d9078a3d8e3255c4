# SPDX-License-Identifier: Apache-2.0
"""What `docker inspect` says of a container, in the contract's words. Called by `driver`; does nothing by itself."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from headrace.platforms.contract import Observed

_KILLED = 128


def observed_of(shown: Mapping[str, Any]) -> Observed:
    """How a container is."""
    name = str(shown.get("Name", "")).lstrip("/")
    state = shown.get("State") or {}
    word = state.get("Status", "")
    if word in ("created", "restarting"):
        # An engine that could not start a container says so there, and leaves it as created.
        if word == "created" and (state.get("Error") or state.get("ExitCode")):
            return Observed("ended", name, "Failed", state.get("ExitCode"), _first(state.get("Error")))
        return Observed("starting", name, "Pending")
    if word in ("running", "paused"):
        return Observed("running", name, "Running", reason="it is paused" if word == "paused" else "")
    if word == "removing":
        return Observed("ended", name, "Terminating", reason="it is being removed")
    if word == "exited":
        code = state.get("ExitCode")
        return Observed("ended", name, "Succeeded" if code == 0 else "Failed", code, _why(state, code))
    if word == "dead":
        return Observed("ended", name, "Failed", state.get("ExitCode"), "the engine could not remove it: see its log")
    return Observed("ended", name, "Unknown", reason=f"the engine calls it {word!a}")


def _why(state: Mapping[str, Any], code: int | None) -> str:
    if state.get("OOMKilled"):
        return "the container was killed because it used more memory than it may"
    if state.get("Error"):
        return _first(state["Error"])
    if code is not None and code > _KILLED:
        try:
            return f"the container was ended by {signal.Signals(code - _KILLED).name}"
        except ValueError:
            pass
    return f"the container has ended with code {code}"


def _first(text: Any) -> str:
    lines = str(text or "").strip().splitlines()
    return lines[0][:500] if lines else "it was never started"


def with_last_words(observed: Observed, lines: list[str]) -> Observed:
    """One that has failed, with what it said last as a reason."""
    said = " | ".join(line.strip()[:200] for line in lines if line.strip())
    if not said:
        return observed
    reason = f"{observed.reason}; it said last: {said}"
    return Observed(observed.phase, observed.name, observed.word, observed.exit_code, reason)


def host_port_of(shown: Mapping[str, Any]) -> int | None:
    """Where a running container is published; None if it is not."""
    bound = (shown.get("NetworkSettings") or {}).get("Ports") or {}
    for places in bound.values():
        for place in places or ():
            if str(place.get("HostPort", "")).isdigit():
                return int(place["HostPort"])
    return None


def is_tegra(info: Mapping[str, Any]) -> bool:
    """Whether the engine's machine, as `docker info` tells it, has its GPU on the chip."""
    kernel = str(info.get("KernelVersion", ""))
    return "tegra" in kernel and "nvidia" in (info.get("Runtimes") or {})
