# SPDX-License-Identifier: Apache-2.0
"""Whether a container has started, is ready, lives: its probes, as a kubelet runs them. Called by `container`.

Who is not ready yet is looked at more often than the probe says, so that requests come as soon as they can; a failure is
counted once in each period, so that thresholds last as long as they do on Kubernetes. To ask a port that nobody has opened
costs a tenth of a millisecond; a look that starts a command costs what that does, and is made less and less often.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace.core.errors import HeadraceError
from headrace.fleet.local.grpc_probes import grpc_look
from headrace.fleet.words import Document, items, part, text, whole
from headrace.platforms.commands import run_command

Look = Callable[[], Awaitable[bool]]
_ANSWER_BYTES = 4096
_SHARE = 0.002
"""Of the time that a start has taken so far: what a cheap look may come too late by. 50 ms after 25 s."""
_COSTLY_SECONDS, _GROWTH = 0.1, 1.2
"""Of looks that are not: the first pause, and how each grows."""


@dataclass(frozen=True)
class Probe:
    """One probe, with Kubernetes' own numbers where it says none."""

    look: Look
    delay: float
    period: float
    failures: int
    successes: int
    cheap: bool = True
    """Whether a look costs next to nothing."""

    @classmethod
    def of(cls, said: Document, look: Look) -> Probe:
        """As a container says it."""
        return cls(
            look,
            float(whole(said, "initialDelaySeconds") or 0),
            float(max(1, whole(said, "periodSeconds") or 10)),
            max(1, whole(said, "failureThreshold") or 3),
            max(1, whole(said, "successThreshold") or 1),
            not part(said, "exec"),
        )


class Failed(Exception):
    """A container is to be restarted: it did not start in time, or does not live."""


async def until_started(probe: Probe, quick: float) -> None:
    """Returns when it has started. Raises Failed when the threshold is reached."""
    await asyncio.sleep(probe.delay)
    if not await _first(probe, quick, probe.failures):
        raise Failed(f"startup probe failed {probe.failures} times")


async def follow_readiness(probe: Probe, quick: float, tell: Callable[[bool], None], ready: bool) -> None:
    """Tell each change, for as long as it is not cancelled."""
    if not ready:
        await asyncio.sleep(probe.delay)
    while True:
        if not ready:
            await _first(probe, quick, None)
            good = 1
            while good < probe.successes:
                await asyncio.sleep(probe.period)
                good = good + 1 if await probe.look() else 0
            tell(True)
        ready = False
        await _until_failed(probe)
        tell(False)


async def follow_liveness(probe: Probe) -> None:
    """Raises Failed when it does not live."""
    await asyncio.sleep(probe.delay)
    await _until_failed(probe)
    raise Failed(f"liveness probe failed {probe.failures} times")


async def _first(probe: Probe, quick: float, most: int | None) -> bool:
    """Whether a look succeeded before `most` periods had failed."""
    clock = asyncio.get_running_loop().time
    began = clock()
    ends = began + probe.period * most if most is not None else None
    pause = quick if probe.cheap else max(quick, _COSTLY_SECONDS)
    while True:
        if await probe.look():
            return True
        if ends is not None and clock() >= ends:
            return False
        await asyncio.sleep(min(pause, probe.period))
        # What has taken so long that one more look is nothing beside it is looked at less often.
        least = (clock() - began) * _SHARE if probe.cheap else pause * _GROWTH
        pause = min(max(quick, least), max(quick, 1.0))


async def _until_failed(probe: Probe) -> None:
    bad = 0
    while bad < probe.failures:
        await asyncio.sleep(probe.period)
        bad = 0 if await probe.look() else bad + 1


def look_of(
    said: Document,
    ports: Mapping[int, int],
    names: Mapping[str, int],
    run: Callable[[list[str], float], Awaitable[bool]],
) -> Look | None:
    """How a probe looks; None where it says nothing that is known. `names`: of ports. `run`: a command, in the container."""
    seconds = float(max(1, whole(said, "timeoutSeconds") or 1))

    def port_of(action: Document) -> int:
        number = action.get("port")
        number = names.get(number, 0) if isinstance(number, str) else number
        return ports.get(number, number) if isinstance(number, int) else 0

    if part(said, "httpGet"):
        action = part(said, "httpGet")
        head = [(text(each, "name"), text(each, "value")) for each in items(action, "httpHeaders")]
        return lambda: http_look(port_of(action), text(action, "path") or "/", head, seconds)
    if part(said, "tcpSocket"):
        return lambda: tcp_look(port_of(part(said, "tcpSocket")), seconds)
    if part(said, "grpc"):
        asked = part(said, "grpc")
        return lambda: grpc_look(port_of(asked), text(asked, "service"), seconds)
    if items(said, "exec", "command"):
        words = [str(each) for each in items(said, "exec", "command")]
        return lambda: run(words, seconds)
    return None


async def http_look(port: int, path: str, head: Sequence[tuple[str, str]], seconds: float) -> bool:
    """Whether a GET is answered with 200 to 399."""
    fields = "".join(f"{name}: {value}\r\n" for name, value in head if (name + value).isprintable())
    asked = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n{fields}\r\n"
    writer = None
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(asked.encode())
            answer = (await reader.readuntil(b"\r\n"))[:_ANSWER_BYTES].split()
        return len(answer) > 1 and answer[1][:1] in (b"2", b"3")
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return False
    finally:
        if writer is not None:
            writer.close()


async def tcp_look(port: int, seconds: float) -> bool:
    """Whether somebody listens."""
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


async def exec_look(words: Sequence[str], variables: Mapping[str, str], seconds: float) -> bool:
    """Whether a command ends well."""
    try:
        return (await run_command(words, seconds=seconds, environment=variables)).code == 0
    except (HeadraceError, OSError):
        return False
