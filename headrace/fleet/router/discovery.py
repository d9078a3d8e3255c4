# SPDX-License-Identifier: Apache-2.0
"""Find backends in a file, in the DNS or among the pods of a cluster.

A source that cannot be read is logged, and its last result counts on: if the name server is unreachable, running backends
are still used.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import orjson
import yaml

from headrace.core.errors import HeadraceError, InvalidArgument
from headrace.core.yaml_loader import load_yaml
from headrace.fleet.router.settings import BackendAddress, DiscoverySettings
from headrace.platforms.kubernetes_client.api import ApiClient, ApiError, Unreachable, connect
from headrace.platforms.kubernetes_client.objects import PODS, ServedResource

log = logging.getLogger("headrace.router")

_FIRST_RESULT_SECONDS = 3.0
_RETRY_SECONDS = 1.0
FILE_SECONDS = 0.5
_MAX_FILE_BYTES = 1 << 20
_FILE_KEYS = {"url", "weight", "grpc", "revision", "role"}
_FILE_EXAMPLE = "write a list such as '- {url: http://10.0.0.7:8000, weight: 2}'"
_API_SECONDS = 10.0
_REFUSALS = {
    401: "the API server rejected our credentials: check the router's service account",
    403: "the API server denied access: bind a Role with list of pods to the router's service account",
}

OnBackends = Callable[[Sequence[BackendAddress]], None]
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolves a host name to addresses; raises OSError."""
FileSignature = tuple[int, int, int, int]


class Source(Protocol):
    """A place where backends are found. Its `str` names it in logs."""

    def watch(self) -> AsyncIterator[Sequence[BackendAddress] | InvalidArgument]:
        """Yield the backends now and after changes; or an error, and then the backends from before count on."""


class Discoverer:
    """Watches all sources and reports the backends when they have changed. Used from the loop's thread only."""

    def __init__(
        self, configured: Sequence[BackendAddress], sources: Sequence[Source], on_backends: OnBackends
    ) -> None:
        self._configured = tuple(configured)
        self._sources = tuple(sources)
        self.on_backends = on_backends
        self._found: dict[Source, tuple[BackendAddress, ...]] = {}
        self._failures: dict[Source, str] = {}
        self._reported: tuple[BackendAddress, ...] = self._configured
        self._updated = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start to watch. Returns when every source has a result, or after a few seconds."""
        self._tasks = [asyncio.create_task(self._watch(source)) for source in self._sources]
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_RESULT_SECONDS):
                while any(source not in self._found and source not in self._failures for source in self._sources):
                    self._updated.clear()
                    await self._updated.wait()

    def refresh(self) -> None:
        """Read files now, without waiting for the interval. Other sources keep their interval."""
        for source in self._sources:
            if isinstance(source, FileSource):
                source.refresh()

    async def close(self) -> None:
        """Stop watching."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def failures(self) -> dict[str, str]:
        """Return the sources that cannot be read now, and why."""
        return {str(source): text for source, text in self._failures.items()}

    async def _watch(self, source: Source) -> None:
        while True:
            try:
                async for result in source.watch():
                    self._update(source, result)
            except Exception:
                log.exception("Discovery of backends in %s failed; trying again", source)
            await asyncio.sleep(_RETRY_SECONDS)

    def _update(self, source: Source, result: Sequence[BackendAddress] | InvalidArgument) -> None:
        if isinstance(result, InvalidArgument):
            if self._failures.get(source) != result.message:
                log.warning("%s: %s; keeping the backends found there before", source, result.message)
            self._failures[source] = result.message
        else:
            self._failures.pop(source, None)
            self._found[source] = tuple(result)
            self._report()
        self._updated.set()

    def _report(self) -> None:
        by_url = {address.url: address for addresses in self._found.values() for address in addresses}
        # The configuration takes precedence over discovery.
        by_url |= {address.url: address for address in self._configured}
        addresses = tuple(by_url.values())
        if addresses != self._reported:
            self._reported = addresses
            self.on_backends(addresses)


def make_sources(settings: DiscoverySettings) -> list[Source]:
    """Return the sources in the settings. Raises InvalidArgument, and FailedPrecondition if there is no cluster."""
    sources: list[Source] = []
    interval = max(0.05, settings.interval_seconds)
    if settings.file:
        sources.append(FileSource(settings.file, interval))
    if settings.dns:
        sources.append(DnsSource(settings.dns, interval))
    selectors = (("", settings.pods), ("prefill", settings.prefill_pods), ("decode", settings.decode_pods))
    for role, selector in selectors:
        if selector:
            sources.append(connect_pods(selector, settings.namespace, settings.port, interval, role=role))
    return sources


class FileSource:
    """Backends in a JSON or YAML file: a list of addresses, or of `{url, weight, grpc, revision, role}`."""

    def __init__(self, path: str, interval_seconds: float) -> None:
        self._path = path
        self._seconds = min(interval_seconds, FILE_SECONDS)
        self._refresh = asyncio.Event()

    def __str__(self) -> str:
        return self._path

    def refresh(self) -> None:
        """Read the file now."""
        self._refresh.set()

    async def watch(self) -> AsyncIterator[Sequence[BackendAddress] | InvalidArgument]:
        """Yield the backends in the file after each change."""
        if file_signature(self._path) is None:
            yield InvalidArgument("the file does not exist yet")
        async for _ in file_changes(self._path, self._seconds, refresh=self._refresh):
            try:
                yield read_backends(self._path)
            except InvalidArgument as error:
                yield error


def read_backends(path: str) -> list[BackendAddress]:
    """Read the backends in a file. Raises InvalidArgument."""
    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read(_MAX_FILE_BYTES + 1)
        if len(text) > _MAX_FILE_BYTES:
            raise InvalidArgument(f"{path} has over {_MAX_FILE_BYTES} characters; {_FILE_EXAMPLE}")
        document = _parse_document(text)
    except (OSError, UnicodeDecodeError):
        raise InvalidArgument(f"{path} cannot be read as text") from None
    except (yaml.YAMLError, ValueError):
        raise InvalidArgument(f"{path} is neither JSON nor YAML; {_FILE_EXAMPLE}") from None
    if isinstance(document, dict) and set(document) == {"backends"}:
        document = document["backends"]
    if not isinstance(document, list):
        # An empty file is most likely being written: keep the backends. `[]` means that there are none.
        raise InvalidArgument(f"{path} has no list; {_FILE_EXAMPLE}")
    return [_parse_backend(entry, path) for entry in document]


def _parse_document(text: str) -> Any:
    try:
        # JSON is YAML too, but this parser is far quicker, and it blocks the event loop.
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return load_yaml(text)


def _parse_backend(entry: Any, path: str) -> BackendAddress:
    if isinstance(entry, str):
        return BackendAddress.parse(entry)
    if not isinstance(entry, dict) or not isinstance(entry.get("url"), str) or set(entry) - _FILE_KEYS:
        raise InvalidArgument(f"{path}: {entry!r} is not a backend; {_FILE_EXAMPLE}")
    text = entry["url"]
    for name in ("weight", "grpc", "revision", "role"):
        if name in entry:
            text += f",{name}={entry[name]}"
    return BackendAddress.parse(text)


class DnsSource:
    """Backends behind one DNS name, one per address. The system's resolver is polled."""

    def __init__(self, text: str, interval_seconds: float, resolve: Resolve | None = None) -> None:
        self._address = BackendAddress.parse(text)
        if self._address.scheme != "http":
            raise InvalidArgument(f"discovery.dns {text!r}: only http is supported for addresses found by name")
        self._seconds = interval_seconds
        self._resolve = resolve or _resolve

    def __str__(self) -> str:
        return f"the name {self._address.host}"

    async def watch(self) -> AsyncIterator[Sequence[BackendAddress] | InvalidArgument]:
        """Yield one backend per address of the name, at an interval."""
        while True:
            try:
                yield await self._poll()
            except OSError as error:
                log.debug("Cannot resolve %s: %s", self._address.host, error)
                yield InvalidArgument("it has no address, or the name server does not answer")
            await asyncio.sleep(self._seconds)

    async def _poll(self) -> list[BackendAddress]:
        configured = self._address
        hosts = await self._resolve(configured.host, configured.port)
        return [_with_host(configured, host) for host in sorted(set(hosts))]


async def _resolve(host: str, port: int) -> list[str]:
    results = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(result[4][0]) for result in results]


def _with_host(configured: BackendAddress, host: str) -> BackendAddress:
    shown_host = f"[{host}]" if ":" in host else host
    grpc_host = host if configured.grpc_host == configured.host else configured.grpc_host
    return replace(
        configured, url=f"{configured.scheme}://{shown_host}:{configured.port}", host=host, grpc_host=grpc_host
    )


class PodSource:
    """Backends that are pods: the ready ones that a label selector finds. Needs `list` of pods in one namespace."""

    def __init__(
        self,
        api: ApiClient,
        selector: str,
        namespace: str,
        port: int,
        interval_seconds: float,
        *,
        role: str = "",
    ) -> None:
        self._api = api
        self._selector = selector
        self._namespace = namespace
        self._port = port
        self._seconds = interval_seconds
        self._role = role

    def __str__(self) -> str:
        return f"pods with {self._selector} in {self._namespace}"

    async def watch(self) -> AsyncIterator[Sequence[BackendAddress] | InvalidArgument]:
        """Yield the ready pods, at an interval."""
        try:
            while True:
                try:
                    yield await self._poll()
                except InvalidArgument as error:
                    yield error
                await asyncio.sleep(self._seconds)
        finally:
            await self._api.close()

    async def _poll(self) -> list[BackendAddress]:
        try:
            # From the API server's cache, which costs it little.
            pods, _ = await self._api.list(
                ServedResource(PODS, "v1"), self._selector, self._namespace, resource_version="0"
            )
        except ApiError as error:
            log.info("The API server answered %d: %s", error.code, error.message[:500])
            raise InvalidArgument(_REFUSALS.get(error.code, f"the API server answered {error.code}")) from None
        except Unreachable as error:
            log.debug("The API server cannot be reached: %s", error)
            raise InvalidArgument("the API server does not answer, or sent an invalid answer") from None
        except HeadraceError as error:  # the login method
            raise InvalidArgument(error.message) from None
        addresses = [self._address(pod) for pod in pods]
        by_url = {address.url: address for address in addresses if address is not None}
        return sorted(by_url.values(), key=lambda address: address.url)

    def _address(self, pod: Any) -> BackendAddress | None:
        """Return the address of a pod that is ready and not being deleted; otherwise None."""
        try:
            if pod["metadata"].get("deletionTimestamp"):
                return None
            conditions = pod["status"].get("conditions") or ()
            ready = any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
            host, port = pod["status"].get("podIP"), self._port or _first_port(pod)
            if not ready or not host or not port:
                return None
            address = BackendAddress.parse(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
            return replace(address, role=self._role)
        except (KeyError, TypeError, AttributeError, HeadraceError):
            return None


def connect_pods(
    selector: str, namespace: str, port: int, interval_seconds: float, kubeconfig: str = "", *, role: str = ""
) -> PodSource:
    """Return a source for the cluster that we run in, or for that of a kubeconfig. Raises FailedPrecondition."""
    api = connect(kubeconfig, timeout=_API_SECONDS)
    return PodSource(api, selector, namespace or api.namespace, port, interval_seconds, role=role)


def _first_port(pod: Any) -> int:
    for container in pod["spec"]["containers"]:
        for port in container.get("ports") or ():
            return int(port["containerPort"])
    return 0


def file_signature(path: str) -> FileSignature | None:
    """Return what differs when a file has changed: device, inode, time and size; None if there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


async def file_changes(
    path: str,
    seconds: float = FILE_SECONDS,
    known: FileSignature | None = None,
    refresh: asyncio.Event | None = None,
) -> AsyncIterator[None]:
    """Yield each time a file has changed; `known`: the signature of what was read already.

    A file that is replaced, as Kubernetes replaces those of a ConfigMap, has another inode. A file that is missing for a
    moment has not changed. `refresh`: set to poll at once.
    """
    while True:
        signature = file_signature(path)
        if signature is not None and signature != known:
            known = signature
            yield None
        if refresh is None:
            await asyncio.sleep(seconds)
            continue
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await refresh.wait()
        refresh.clear()
