# SPDX-License-Identifier: Apache-2.0
"""Download an http(s) URL to a file: `fetch` is the only function that fetches URLs."""

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
from headrace.models.storage.errors import DiskFull
from headrace.models.storage.locations import WebUrl, parse_web_url, public_text
from headrace.models.storage.partial_files import PartialFile

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Listed although `is_global` knows most of them: its answers have changed between patch releases of Python.
_REFUSED: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "168.63.129.16/32",  # Azure's own services, at an address that looks public
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
        "::/96",  # unspecified, loopback, and deprecated IPv4-compatible addresses
        "64:ff9b:1::/48",
        "100::/64",
        "2001::/23",  # Teredo and other protocol assignments
        "2001:db8::/32",
        "2002::/16",  # 6to4
        "5f00::/16",
        "fc00::/7",
        "fe80::/10",
        "fec0::/10",
        "ff00::/8",
    )
)
_METADATA: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in ("169.254.0.0/16", "fe80::/10", "fd00:ec2::254/128", "168.63.129.16/32", "100.100.100.200/32")
)
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def embedded_ipv4(address: Address) -> Address:
    """Return the IPv4 address inside an IPv6 address (mapped, or NAT64), or the address itself."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            address = ipaddress.IPv6Address(int(address))
        if address in _MAPPED or address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def is_public(address: Address) -> bool:
    """Return whether an address is public."""
    address = embedded_ipv4(address)
    return address.is_global and not any(address in network for network in _REFUSED)


def is_metadata_service(address: Address) -> bool:
    """Return whether a cloud's metadata service, which has credentials, is at this address."""
    address = embedded_ipv4(address)
    return any(address in network for network in _METADATA)


def is_listed(host: str, names: Sequence[str]) -> bool:
    """Return whether a host is in a list of names; `*.domain` matches every host below a domain."""
    host = host.rstrip(".").lower()
    patterns = [name.rstrip(".").lower() for name in names]
    return any(host == name or (name.startswith("*.") and host.endswith(name[1:])) for name in patterns)


def may_reach(host: str, address: Address, private_hosts: Sequence[str]) -> bool:
    """Return whether to connect to an address: it is public, or the operator has listed the host or its network."""
    if is_public(address) or is_listed(host, private_hosts):
        return True
    inner = embedded_ipv4(address)
    return any(inner in network for network in map(_network, private_hosts) if network is not None)


def _network(text: str) -> Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


log = logging.getLogger("headrace.storage")

Resolve = Callable[[str, int], Sequence[Address]]
"""Returns all addresses of a host; raises OSError if there are none."""

_PIECE = 256 * 1024
_GLANCE_SECONDS = 0.2
_NOT_THE_REST = (206, 416)
_REDIRECTS = (301, 302, 303, 307, 308)


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """Which URLs may be fetched, and limits of time and size."""

    max_bytes: int = 512 * MIB
    total_seconds: float = 60.0
    """Time limit for the whole download, with redirects."""
    idle_seconds: float = 10.0
    """Time limit without any received byte, also for connecting."""
    redirects: int = 5
    allow_hosts: tuple[str, ...] = ()
    """Allowed hosts, or `*.domain`, checked for every redirect; () for all."""
    private_hosts: tuple[str, ...] = ()
    """Hosts (`*.domain`) or networks (10.1.0.0/16) that may be at private addresses."""
    ca_file: Path | None = None
    """Certificate authorities to trust instead of the system's."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The downloaded file."""

    path: Path
    size: int
    content_type: str
    """Content type without parameters, in lower case; "" if the server sent none."""


def never_cancelled() -> bool:
    """Return False: for callers that cannot be cancelled."""
    return False


def addresses_of(host: str, port: int) -> list[Address]:
    """Resolve a host with the system's resolver."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [ipaddress.ip_address(str(entry[4][0])) for entry in infos]


def fetch(
    url: str,
    to: Path,
    policy: FetchPolicy,
    *,
    progress: Callable[[int, int | None], None] | None = None,
    cancelled: Callable[[], bool] = never_cancelled,
    resolve: Resolve = addresses_of,
    journal: Path | None = None,
) -> Fetched:
    """Download a URL into the file `to`, completely or not at all.

    `progress` is called with the received and the total bytes (if known). With `journal`, a file of notes, an
    interrupted download stays beside `to` and is resumed by the next call with the same journal. Raises InvalidArgument
    for permanent errors, Unavailable for temporary ones, Cancelled when cancelled.
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
    """The time limits of one download."""

    def __init__(self, shown: str, policy: FetchPolicy, cancelled: Callable[[], bool]) -> None:
        self.idle_seconds = policy.idle_seconds
        self._shown = shown
        self._policy = policy
        self._cancelled = cancelled
        self._end = time.monotonic() + policy.total_seconds

    def left(self) -> float:
        """Return the seconds for the next wait. Raises when the time is over or the download is cancelled."""
        if self._cancelled():
            raise Cancelled(f"fetching {self._shown} was cancelled")
        remaining = self._end - time.monotonic()
        if remaining <= 0:
            raise Unavailable(f"{self._shown} took longer than {self._policy.total_seconds:g} seconds")
        return min(remaining, self._policy.idle_seconds)


class _Reading(io.RawIOBase):
    """The bytes of a socket; checks the time limits before each wait. A socket timeout alone restarts with every byte."""

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
    """The part of a socket that `http.client` needs."""

    def __init__(self, sock: socket.socket, pace: _Pace) -> None:
        self._sock = sock
        self._pace = pace

    def makefile(self, mode: str) -> IO[bytes]:
        return io.BufferedReader(_Reading(self._sock, self._pace), 64 * 1024)

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(self._pace.left())
        self._sock.sendall(data)

    def close(self) -> None:
        """Do nothing: the response reads on after its connection has closed this; `_answer` closes the socket."""


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
        with _answer(at, shown, policy, pace, resolve, partial.range_headers(), redirected=hop > 0) as answer:
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
    """Request a URL at a checked address."""
    if policy.allow_hosts and not is_listed(at.host, policy.allow_hosts):
        subject = f"{shown} redirects to a host" if redirected else f"{at.host} is a host"
        raise InvalidArgument(
            f"{subject} that this server may not fetch from; its operator has listed those that it may"
        )
    sock = _connect(_judged(at, shown, policy, resolve, redirected=redirected), at.port, pace)
    with contextlib.closing(sock):
        if at.scheme == "https":
            context = ssl.create_default_context(cafile=None if policy.ca_file is None else str(policy.ca_file))
            sock.settimeout(pace.left())
            sock = context.wrap_socket(sock, server_hostname=at.host)
        with contextlib.closing(sock):
            connection = http.client.HTTPConnection(at.host, at.port)
            connection.auto_open = 0  # It would resolve the name itself.
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
    # Do not reveal whether a private name exists: an unknown host and a private one give the same error.
    wrong = InvalidArgument(
        f"{shown} {'redirects to a host that ' if redirected else ''}was not found, or is at an address that is not public; "
        "such are fetched from only if the server's operator has listed the host"
    )
    try:
        addresses = resolve(at.host, at.port)
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:
            raise Unavailable(f"the host of {shown} could not be looked up now; try again") from None
        raise wrong from None
    except (OSError, UnicodeError):
        raise wrong from None
    if not addresses or not all(may_reach(at.host, address, policy.private_hosts) for address in addresses):
        raise wrong
    return list(dict.fromkeys(addresses))


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
        if answer.status in _NOT_THE_REST and partial.range_headers():
            partial.forget()
            raise Unavailable(
                f"the server of {shown} could not resume where it was interrupted; try again from the start"
            )
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
