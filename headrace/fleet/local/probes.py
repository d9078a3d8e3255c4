# SPDX-License-Identifier: Apache-2.0
"""Startup, readiness and liveness probes of containers, as a kubelet runs them.

A container that is not ready is probed more often than its period, so that it gets requests as soon as possible; a failure
counts once per period, so that thresholds last as long as on Kubernetes. A connection to a closed port costs a tenth of a
millisecond; a probe that runs a command costs more, and is repeated less and less often.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace.core.errors import HeadraceError
from headrace.net.http2.frames import (
    ACK,
    DATA,
    DEFAULT_FRAME_BYTES,
    END_HEADERS,
    END_STREAM,
    HEADER,
    HEADER_BYTES,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    SETTINGS_ACK,
    frame,
)
from headrace.net.http2.headers import encode_field
from headrace.platforms.commands import run_command
from headrace.platforms.kubernetes_client.objects import Document, get_int, get_list, get_mapping, get_str

Check = Callable[[], Awaitable[bool]]
_ANSWER_BYTES = 4096
_PAUSE_SHARE = 0.002
"""Pause between cheap checks, as a share of the time since the start: 50 ms after 25 s."""
_EXEC_SECONDS, _EXEC_GROWTH = 0.1, 1.2
"""Pause between checks that run a command: the first one, and its growth."""


@dataclass(frozen=True)
class Probe:
    """One probe, with Kubernetes' defaults."""

    check: Check
    delay: float
    period: float
    failures: int
    successes: int
    is_cheap: bool = True
    """Whether a check costs next to nothing: it runs no command."""

    @classmethod
    def parse(cls, document: Document, check: Check) -> Probe:
        """Return the probe of a container's manifest."""
        return cls(
            check,
            float(get_int(document, "initialDelaySeconds") or 0),
            float(max(1, get_int(document, "periodSeconds") or 10)),
            max(1, get_int(document, "failureThreshold") or 3),
            max(1, get_int(document, "successThreshold") or 1),
            not get_mapping(document, "exec"),
        )


class ProbeFailed(Exception):
    """A container has to be restarted: it did not start in time, or its liveness probe failed."""


async def wait_started(probe: Probe, quick: float) -> None:
    """Wait until the startup probe succeeds. Raises ProbeFailed when the threshold is reached."""
    await asyncio.sleep(probe.delay)
    if not await _wait_success(probe, quick, probe.failures):
        raise ProbeFailed(f"startup probe failed {probe.failures} times")


async def watch_readiness(probe: Probe, quick: float, report: Callable[[bool], None], ready: bool) -> None:
    """Report each change of readiness until cancelled."""
    if not ready:
        await asyncio.sleep(probe.delay)
    while True:
        if not ready:
            await _wait_success(probe, quick, None)
            successes = 1
            while successes < probe.successes:
                await asyncio.sleep(probe.period)
                successes = successes + 1 if await probe.check() else 0
            report(True)
        ready = False
        await _wait_failed(probe)
        report(False)


async def watch_liveness(probe: Probe) -> None:
    """Raise ProbeFailed when the liveness probe fails."""
    await asyncio.sleep(probe.delay)
    await _wait_failed(probe)
    raise ProbeFailed(f"liveness probe failed {probe.failures} times")


async def _wait_success(probe: Probe, quick: float, max_failures: int | None) -> bool:
    """Check until one succeeds; return False after `max_failures` failed periods."""
    clock = asyncio.get_running_loop().time
    began = clock()
    ends = began + probe.period * max_failures if max_failures is not None else None
    pause = quick if probe.is_cheap else max(quick, _EXEC_SECONDS)
    while True:
        if await probe.check():
            return True
        if ends is not None and clock() >= ends:
            return False
        await asyncio.sleep(min(pause, probe.period))
        # The longer a start takes, the less a short delay matters.
        minimum_pause = (clock() - began) * _PAUSE_SHARE if probe.is_cheap else pause * _EXEC_GROWTH
        pause = min(max(quick, minimum_pause), max(quick, 1.0))


async def _wait_failed(probe: Probe) -> None:
    failures = 0
    while failures < probe.failures:
        await asyncio.sleep(probe.period)
        failures = 0 if await probe.check() else failures + 1


def probe_check(
    document: Document,
    ports: Mapping[int, int],
    port_names: Mapping[str, int],
    run: Callable[[list[str], float], Awaitable[bool]],
) -> Check | None:
    """Return the check of a probe; None if it has no known action. `port_names`: ports by name. `run`: runs a command."""
    seconds = float(max(1, get_int(document, "timeoutSeconds") or 1))

    def port_of(action: Document) -> int:
        number = action.get("port")
        number = port_names.get(number, 0) if isinstance(number, str) else number
        return ports.get(number, number) if isinstance(number, int) else 0

    if get_mapping(document, "httpGet"):
        action = get_mapping(document, "httpGet")
        headers = [(get_str(header, "name"), get_str(header, "value")) for header in get_list(action, "httpHeaders")]
        return lambda: check_http(port_of(action), get_str(action, "path") or "/", headers, seconds)
    if get_mapping(document, "tcpSocket"):
        return lambda: check_tcp(port_of(get_mapping(document, "tcpSocket")), seconds)
    if get_mapping(document, "grpc"):
        action = get_mapping(document, "grpc")
        return lambda: check_grpc(port_of(action), get_str(action, "service"), seconds)
    if get_list(document, "exec", "command"):
        args = [str(arg) for arg in get_list(document, "exec", "command")]
        return lambda: run(args, seconds)
    return None


async def check_http(port: int, path: str, headers: Sequence[tuple[str, str]], seconds: float) -> bool:
    """Whether a GET returns a status from 200 to 399."""
    header_lines = "".join(f"{name}: {value}\r\n" for name, value in headers if (name + value).isprintable())
    request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n{header_lines}\r\n"
    writer = None
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request.encode())
            answer = (await reader.readuntil(b"\r\n"))[:_ANSWER_BYTES].split()
        return len(answer) > 1 and answer[1][:1] in (b"2", b"3")
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return False
    finally:
        if writer is not None:
            writer.close()


async def check_tcp(port: int, seconds: float) -> bool:
    """Whether a server accepts connections."""
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


async def check_exec(args: Sequence[str], variables: Mapping[str, str], seconds: float) -> bool:
    """Whether a command succeeds."""
    try:
        return (await run_command(args, seconds=seconds, environment=variables)).code == 0
    except (HeadraceError, OSError):
        return False


_SERVING = b"\0\0\0\0\x02\x08\x01"
"""The message of HealthCheckResponse SERVING: uncompressed, two bytes, field 1 is 1."""
_FIELDS = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/grpc.health.v1.Health/Check"),
    (b":authority", b"localhost"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
)
_STREAM = 1
_LONGEST_NAME = 127
"""The length of the name must fit one byte."""


async def check_grpc(port: int, service: str, seconds: float) -> bool:
    """Whether `grpc.health.v1.Health/Check` reports SERVING. An empty name means the whole server.

    One call needs little of HTTP/2: the request is written at once, and of the answer only the message counts, since an
    answer without SERVING is a failure whatever its status. So no header is parsed, and no gRPC library is loaded.
    """
    writer = None
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(_health_request(service))
            return await _read_message(reader, writer) == _SERVING
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
        return False
    finally:
        if writer is not None:
            writer.close()


def _health_request(service: str) -> bytes:
    name = service.encode()[:_LONGEST_NAME]
    message = b"\n%c%b" % (len(name), name) if name else b""
    return b"".join(
        (
            PREFACE,
            frame(SETTINGS, 0, 0),
            frame(HEADERS, END_HEADERS, _STREAM, b"".join(encode_field(*header) for header in _FIELDS)),
            frame(DATA, END_STREAM, _STREAM, len(message).to_bytes(5, "big") + message),
        )
    )


async def _read_message(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Return the message with its five-byte prefix, or what was received of it when the call ended."""
    message = b""
    while len(message) < len(_SERVING):
        high, low, kind, flags, stream = HEADER.unpack(await reader.readexactly(HEADER_BYTES))
        length = high << 8 | low
        if length > DEFAULT_FRAME_BYTES:
            raise ValueError("not HTTP/2, or a frame larger than our settings allow")
        payload = await reader.readexactly(length)
        if kind == SETTINGS and not flags & ACK:
            writer.write(SETTINGS_ACK)
        elif kind == PING and not flags & ACK:
            writer.write(frame(PING, ACK, 0, payload))
        elif kind == DATA and flags & PADDED:
            message += payload[1 : len(payload) - int.from_bytes(payload[:1], "big")]
        elif kind == DATA:
            message += payload
        if kind == RST_STREAM or (stream == _STREAM and kind in (DATA, HEADERS) and flags & END_STREAM):
            break
    return message
