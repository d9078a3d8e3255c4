# SPDX-License-Identifier: Apache-2.0
"""Looks at a server or a router, for `top`: its metrics as numbers, and what state its models or backends are in.

`/metrics` of a server with several workers has the numbers of all of them; its v2 statistics are one worker's, so they are
not asked.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.cli.client import Refused, ServerClient
from headrace.cli.top_rates import View, router_view, server_view
from headrace.core.errors import Unavailable, Unimplemented

Labels = tuple[tuple[str, str], ...]
Metrics = dict[str, dict[Labels, float]]

_LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)(?: \S+)?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
_WANTED = ("nv_", "process_", "headrace_router_")


@dataclass(frozen=True)
class Look:
    """What was seen at one moment."""

    at: float
    """By a clock that is not set."""
    metrics: Metrics
    states: tuple[Mapping[str, Any], ...] = ()
    """Of a server: its repository's index. Of a router: its backends."""
    about: Mapping[str, Any] = field(default_factory=dict)


class Client(ServerClient):
    """The same client, which reads a page of metrics too."""

    def _read(self, status: int, content: bytes, path: str) -> Any:
        if status == 200 and path.endswith("/metrics"):
            return content.decode(errors="replace")
        try:
            return super()._read(status, content, path)
        except Unavailable as error:
            raise NotJson(error.message) from None


class NotJson(Unavailable):
    """Raise when something answers, but no JSON."""


class Poller:
    """One server or router."""

    def __init__(self, client: Client, *, is_router: bool) -> None:
        self._client = client
        self._is_router = is_router
        self.url = client.url

    def look(self) -> Look:
        """Ask now. Raises a HeadraceError where nobody answers, or answers something else."""
        if self._is_router:
            status = self._client.get("/router/status")
            metrics = read_metrics(self._client.get("/router/metrics"))
            return Look(time.monotonic(), metrics, tuple(status.get("backends") or ()), status)
        try:
            metrics = read_metrics(self._client.get("/metrics"))
        except Refused as refused:
            if refused.status != 404:  # a key is missing, or has too little scope: it says so itself
                raise
            raise Unimplemented(
                f"{self.url} has no /metrics: name the port that has them, or start it without --allow-metrics=false"
            ) from None
        at = time.monotonic()
        if not any(name.startswith("nv_") for name in metrics):
            raise Unavailable(f"{self.url}/metrics has none of a model server: is that a Headrace server?")
        return Look(at, metrics, self._index())

    def view(self, before: Look, after: Look) -> View:
        """What happened between two looks."""
        make = router_view if self._is_router else server_view
        return make(self.url, before, after)

    def _index(self) -> tuple[Mapping[str, Any], ...]:
        try:
            index = self._client.post("/v2/repository/index", {})
        except (
            Refused,
            NotJson,
        ):  # a port for metrics alone, or one that keeps this to others: there are the numbers still
            return ()
        return tuple(each for each in index or () if isinstance(each, dict))


def open_poller(url: str) -> Poller:
    """Find out what is there. Raises a HeadraceError where nobody answers."""
    client = Client(url)
    try:
        status = client.get("/router/status")
    except (Refused, NotJson):
        return Poller(client, is_router=False)
    return Poller(client, is_router=isinstance(status, dict) and "backends" in status)


def read_metrics(text: str) -> Metrics:
    """Prometheus's text: numbers by name and labels. Lines in another form, and names of no use, are left out."""
    found: Metrics = {}
    for line in text.splitlines():
        if not line.startswith(_WANTED):
            continue
        parts = _LINE.fullmatch(line)
        if parts is None:
            continue
        try:
            value = float(parts[3])
        except ValueError:
            continue
        labels = tuple((name, _unescaped(value_)) for name, value_ in _LABEL.findall(parts[2] or ""))
        found.setdefault(parts[1], {})[labels] = value
    return found


def _unescaped(text: str) -> str:
    return re.sub(r"\\.", lambda found: _ESCAPES.get(found[0], found[0]), text) if "\\" in text else text
