# SPDX-License-Identifier: Apache-2.0
"""The one function that fetches an http(s) URL into a file: `fetch`.

Called in threads by `bringing` and by `media`. Nothing else in the server may fetch what a client named. A host is resolved
once, all its addresses are judged, and the connection goes to one of those; each redirect is a new URL that is judged the
same way. No credentials, cookies or proxies are used: there is nothing to carry to the wrong host, and a proxy would
resolve the name again. Texts of errors tell no address, no query and nothing of where a redirect led.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import ipaddress
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import urljoin

from headrace.core.errors import Cancelled, HeadraceError, InvalidArgument, Unavailable
from headrace.core.limits import MIB
from headrace.models.storage.addresses import Address, is_listed, may_reach
from headrace.models.storage.locations import public_text
from headrace.models.storage.partial_file import PartialFile
from headrace.models.storage.problems import DiskFull
from headrace.models.storage.urls import WebUrl, parse_web_url

log = logging.getLogger("headrace.storage")

Resolve = Callable[[str, int], Sequence[Address]]
"""All addresses of a host. Raises OSError when there are none."""

_PIECE = 256 * 1024
_GLANCE_SECONDS = 0.2
_NOT_THE_REST = (206, 416)
_REDIRECTS = (301, 302, 303, 307, 308)


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """What may be fetched, and how much of time and space it may take."""

    max_bytes: int = 512 * MIB
    total_seconds: float = 60.0
    """From the first look at the URL to the last byte, redirects and all."""
    idle_seconds: float = 10.0
    """The longest silence, also while connecting."""
    redirects: int = 5
    allow_hosts: tuple[str, ...] = ()
    """Hosts, or `*.domain` for all below one, of which every hop must be; () for all."""
    private_hosts: tuple[str, ...] = ()
    """Hosts (`*.domain`) or networks (10.1.0.0/16) that may be at addresses which are not public."""
    ca_file: Path | None = None
    """Authorities whose certificates are believed, instead of the system's."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What lies in the file now."""

    path: Path
    size: int
    content_type: str
    """As the server said, without parameters, in lower case; "" if it did not."""


def never() -> bool:
    """Never cancelled: for callers who cannot be."""
    return False


def addresses_of(host: str, port: int) -> list[Address]:
    """What the system's resolver says."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [ipaddress.ip_address(str(entry[4][0])) for entry in found]


def fetch(
    url: str,
    to: Path,
    policy: FetchPolicy,
    *,
    progress: Callable[[int, int | None], None] | None = None,
    cancelled: Callable[[], bool] = never,
    resolve: Resolve = addresses_of,
    journal: Path | None = None,
) -> Fetched:
    """Fetch a URL into the file `to`: whole, or not at all.

    `progress` hears of the bytes so far and of all, if known. With `journal`, a file of notes, what is cut off stays beside
    `to` and is continued by the next call with the same one. Raises InvalidArgument for what will stay wrong, Unavailable
    for what may be better later, Cancelled when told so.
    """
    shown = public_text(url)
    pace = _Pace(shown, policy, cancelled)
    try:
        return _follow(url, shown, to, policy, pace, progress, resolve, PartialFile(to, journal))
    except HeadraceError:
        raise
    except TimeoutError:
        raise Unavailable(f"{shown} was too slow: its server did not answer in time") from None
    except ssl.SSLCertVerificationError:
        raise InvalidArgument(
            f"the certificate of {shown} is not valid for its host, or not of a known authority"
        ) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        log.info("fetching from %s failed: %s", shown, type(error).__name__)
        raise Unavailable(f"{shown} could not be fetched: the connection failed or its server speaks no HTTP") from None


class _Pace:
    """The clock of one fetch."""

    def __init__(self, shown: str, policy: FetchPolicy, cancelled: Callable[[], bool]) -> None:
        self.idle_seconds = policy.idle_seconds
        self._shown = shown
        self._policy = policy
        self._cancelled = cancelled
        self._end = time.monotonic() + policy.total_seconds

    def left(self) -> float:
        """Seconds for the next wait. Raises when there are none or nobody wants them."""
        if self._cancelled():
            raise Cancelled(f"fetching {self._shown} was cancelled")
        left = self._end - time.monotonic()
        if left <= 0:
            raise Unavailable(f"{self._shown} took longer than {self._policy.total_seconds:g} seconds")
        return min(left, self._policy.idle_seconds)


class _Reading(io.RawIOBase):
    """A socket's bytes, with an eye on the clock before each wait. A timeout of the socket alone restarts at every byte."""

    def __init__(self, sock: socket.socket, pace: _Pace) -> None:
        self._sock = sock
        self._pace = pace

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        silent_since = time.monotonic()
        while True:
            self._sock.settimeout(min(self._pace.left(), _GLANCE_SECONDS))
            try:
                return self._sock.recv_into(buffer)
            except TimeoutError:
                if time.monotonic() - silent_since >= self._pace.idle_seconds:
                    raise


class _Socket:
    """What `http.client` wants of a socket, and no more."""

    def __init__(self, sock: socket.socket, pace: _Pace) -> None:
        self._sock = sock
        self._pace = pace

    def makefile(self, mode: str) -> IO[bytes]:
        return io.BufferedReader(_Reading(self._sock, self._pace), 64 * 1024)

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(self._pace.left())
        self._sock.sendall(data)

    def close(self) -> None:
        """The response goes on reading after its connection closed this; `_answer` closes the socket."""


def _follow(
    url: str,
    shown: str,
    to: Path,
    policy: FetchPolicy,
    pace: _Pace,
    progress: Callable[[int, int | None], None] | None,
    resolve: Resolve,
    partial: PartialFile,
) -> Fetched:
    at = parse_web_url(url)
    for hop in range(policy.redirects + 1):
        with _answer(at, shown, policy, pace, resolve, partial.asked(), redirected=hop > 0) as answer:
            if answer.status not in _REDIRECTS:
                return _take(answer, shown, to, policy, pace, progress, partial)
            at = _next(at, answer.headers.get("Location", ""), shown)
    raise InvalidArgument(f"{shown} redirects more than {policy.redirects} times; give the URL that it ends at")


def _next(at: WebUrl, location: str, shown: str) -> WebUrl:
    if not location:
        raise InvalidArgument(f"{shown} redirects to nowhere")
    try:
        target = parse_web_url(urljoin(at.text, location))
    except (InvalidArgument, ValueError):
        raise InvalidArgument(
            f"{shown} redirects to what is not an http:// or https:// URL; it is not followed"
        ) from None
    if at.scheme == "https" and target.scheme != "https":
        raise InvalidArgument(f"{shown} redirects from https to http; it is not followed")
    return target


@contextlib.contextmanager
def _answer(
    at: WebUrl,
    shown: str,
    policy: FetchPolicy,
    pace: _Pace,
    resolve: Resolve,
    more: dict[str, str],
    *,
    redirected: bool,
) -> Iterator[http.client.HTTPResponse]:
    """Ask for a URL at an address that was judged."""
    if policy.allow_hosts and not is_listed(at.host, policy.allow_hosts):
        what = f"{shown} redirects to a host" if redirected else f"{at.host} is a host"
        raise InvalidArgument(f"{what} that this server may not fetch from; its operator has listed those that it may")
    sock = _connect(_judged(at, shown, policy, resolve, redirected=redirected), at.port, pace)
    with contextlib.closing(sock):
        if at.scheme == "https":
            context = ssl.create_default_context(cafile=None if policy.ca_file is None else str(policy.ca_file))
            sock.settimeout(pace.left())
            sock = context.wrap_socket(sock, server_hostname=at.host)
        with contextlib.closing(sock):
            connection = http.client.HTTPConnection(at.host, at.port)
            connection.auto_open = 0  # it would resolve the name by itself
            connection.sock = cast("socket.socket", _Socket(sock, pace))
            connection.putrequest("GET", at.target, skip_host=True, skip_accept_encoding=True)
            for name, value in (
                ("Host", at.authority),
                ("Accept", "*/*"),
                ("Accept-Encoding", "identity"),
                ("User-Agent", "headrace"),
                ("Connection", "close"),
                *more.items(),
            ):
                connection.putheader(name, value)
            connection.endheaders()
            with connection.getresponse() as answer:
                yield answer


def _judged(at: WebUrl, shown: str, policy: FetchPolicy, resolve: Resolve, *, redirected: bool) -> Sequence[Address]:
    # Whether a private name exists is nobody's business: no such host and a private one read the same.
    wrong = InvalidArgument(
        f"{shown} {'redirects to a host that ' if redirected else ''}was not found, or is at an address that is not public; "
        "such are fetched from only if the server's operator has listed the host"
    )
    try:
        found = resolve(at.host, at.port)
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:
            raise Unavailable(f"the host of {shown} could not be looked up now; try again") from None
        raise wrong from None
    except (OSError, UnicodeError):
        raise wrong from None
    if not found or not all(may_reach(at.host, address, policy.private_hosts) for address in found):
        raise wrong
    return list(dict.fromkeys(found))


def _connect(addresses: Sequence[Address], port: int, pace: _Pace) -> socket.socket:
    failure: OSError = OSError("no address")
    for address in addresses:
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(pace.left())
            sock.connect((str(address), port))
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure


def _take(
    answer: http.client.HTTPResponse,
    shown: str,
    to: Path,
    policy: FetchPolicy,
    pace: _Pace,
    progress: Callable[[int, int | None], None] | None,
    partial: PartialFile,
) -> Fetched:
    start = partial.begins_at(answer)
    if start is None:
        if answer.status in _NOT_THE_REST and partial.asked():
            partial.forget()
            raise Unavailable(f"the server of {shown} could not go on where it was cut off; try again from the start")
        kind = Unavailable if answer.status >= 500 or answer.status == 429 else InvalidArgument
        raise kind(f"the server of {shown} answered {answer.status}, not the file")
    if answer.headers.get("Content-Encoding", "identity").strip().lower() not in {"", "identity"}:
        raise InvalidArgument(f"the server of {shown} sent the file compressed, although asked not to; it is not read")
    total = None if answer.length is None else start + answer.length
    too_large = InvalidArgument(f"{shown} is larger than {policy.max_bytes} bytes, the most that this server fetches")
    if max(total or 0, start) > policy.max_bytes:
        raise too_large
    with partial.written(answer, start) as file:
        size = start
        while piece := answer.read(min(_PIECE, policy.max_bytes - size + 1)):
            pace.left()
            size += len(piece)
            if size > policy.max_bytes:
                raise too_large
            _write(file, piece, shown, total)
            if progress is not None:
                progress(size, total)
        if answer.length:
            raise Unavailable(f"the server of {shown} closed the connection before the file's end")
    return Fetched(to, size, answer.headers.get_content_type() if "Content-Type" in answer.headers else "")


def _write(file: IO[bytes], piece: bytes, shown: str, total: int | None) -> None:
    try:
        file.write(piece)
    except OSError:
        log.exception("writing what came from %s failed", shown)
        raise DiskFull(f"this server has no room to keep {shown} for now", total) from None
