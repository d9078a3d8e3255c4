# SPDX-License-Identifier: Apache-2.0
"""The daemon's ear: HTTP on a UNIX socket that its owner alone may open. `POST /v1/VERB` with JSON, JSON back.

Asked by `client`. What a verb means is here; what it brings about, the controller sees by itself.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, NotFound
from headrace.fleet import schema
from headrace.fleet.client.contract import Change
from headrace.fleet.local.benchmarking import BENCHMARK, Benchmarks
from headrace.fleet.local.controller import SERVICE, Controller
from headrace.fleet.local.events import Events
from headrace.fleet.local.kubelet import Kubelet
from headrace.fleet.local.settings import SOCKET, LocalSettings
from headrace.fleet.local.store import CORE, Store, key_of, takes
from headrace.fleet.words import Document, items, kind_of, name_of, part, text
from headrace.net.http.heads import CONTENT_TYPE, JSON, ResponseHead
from headrace.net.http.routes import Routes
from headrace.net.http.status import HTTP_STATUS
from headrace.net.negotiation import NegotiatingProtocol
from headrace.net.server import WireServer
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.version import __version__

if TYPE_CHECKING:
    from headrace.net.http.exchange import Exchange

log = logging.getLogger("headrace.fleet")

Asked = dict[str, Any]
_MOST_LINES = 100_000
_MOST_SECONDS = 1e6


class Control:
    """The verbs."""

    def __init__(
        self,
        settings: LocalSettings,
        store: Store,
        kubelet: Kubelet,
        controller: Controller,
        benchmarks: Benchmarks,
        events: Events,
    ) -> None:
        self._settings = settings
        self._store = store
        self._kubelet = kubelet
        self._controller = controller
        self._benchmarks = benchmarks
        self._events = events
        self._tasks: set[asyncio.Task[None]] = set()
        self._verbs: dict[str, Callable[[Asked], Any]] = {
            "info": self._info,
            "list": self._list,
            "get": self._get,
            "apply": self._apply,
            "patch": self._patch,
            "delete": self._delete,
            "pods": self._pods,
            "events": self._told,
            "progress": self._progress,
            "facts": self._all_facts,
            "logs": self._logs,
            "scale": self._scale,
            "replicas": self._replicas,
            "woken": self._woken,
        }

    def server(self) -> WireServer:
        """A server of the verbs, not started yet."""
        routes = Routes()
        routes.add("POST", "/v1/{verb}", self._answer)
        site = Site(routes)
        address = Address.parse(f"unix:{self._settings.root / SOCKET}")
        return WireServer(site, address, partial(NegotiatingProtocol, site), unix_mode=0o600)

    def do(self, verb: str, asked: Asked) -> Any:
        """What a verb brings, or something to wait for, for who is in this process. Raises classes of `core.errors`."""
        work = self._verbs.get(verb)
        if work is None:
            raise NotFound(f"there is no verb {verb[:32]!a} here: is the other side another version?")
        return work(asked)

    def _answer(self, exchange: Exchange) -> None:
        try:
            found = self._called(exchange)
            if not inspect.isawaitable(found):
                _tell(exchange, found)
                return
        except Exception as error:
            _fail(exchange, error)
            return
        task = asyncio.ensure_future(_tell_later(exchange, found))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _called(self, exchange: Exchange) -> Any:
        try:
            asked = json.loads(bytes(exchange.body) or b"{}")
        except (ValueError, RecursionError):
            raise InvalidArgument("what was sent is not JSON, or is nested too deeply") from None
        if not isinstance(asked, dict):
            raise InvalidArgument("what was sent is no mapping")
        try:
            return self.do(exchange.params[0], asked)
        except RecursionError:  # what a document may hold freely can be deeper than what follows it can go
            raise InvalidArgument("what was sent is nested too deeply") from None

    # Documents

    def _info(self, asked: Asked) -> Asked:
        return {"version": __version__, "root": str(self._settings.root), "node": self._settings.node}

    def _list(self, asked: Asked) -> list[Document]:
        selector = selected(text(asked, "selector"))
        return self._store.all(text(asked, "kind"), text(asked, "namespace"), selector)

    def _get(self, asked: Asked) -> Document | None:
        return self._store.get(text(asked, "kind"), text(asked, "namespace"), text(asked, "name"))

    def _apply(self, asked: Asked) -> Asked:
        document = part(asked, "document")
        if not takes(document):
            raise InvalidArgument(
                f"{kind_of(document) or 'a document without a kind'} is nothing that this machine's fleet takes: it has the "
                f"kinds of ome.io, and {', '.join(sorted(CORE))}"
            )
        problems = schema.check(document) if kind_of(document) not in CORE else []
        if problems:
            raise InvalidArgument("; ".join(str(each) for each in problems[:8]))
        before = self._store.get(*key_of(document))
        if before is not None and text(before, "metadata", "deletionTimestamp"):
            raise FailedPrecondition(f"{name_of(document)} is being deleted: apply it when it is gone")
        made, change = self._store.applied(document, dry_run=asked.get("dry_run") is True)
        told: Change = "created" if change == "created" else "configured" if change == "configured" else "unchanged"
        return {"document": made, "change": told}

    def _patch(self, asked: Asked) -> Document:
        live = self._one(asked)
        change = part(asked, "change")
        if self._store.edited_since(live, text(change, "metadata", "resourceVersion")):
            raise FailedPrecondition(f"{name_of(live)} was changed meanwhile: look at it again")
        metadata = {
            name: value for name, value in part(change, "metadata").items() if name in ("labels", "annotations")
        }
        wanted = {name: value for name, value in change.items() if name in ("spec", "data")}
        if metadata:
            wanted["metadata"] = metadata
        changed = _merged(live, wanted)
        problems = schema.check(changed) if kind_of(live) not in CORE else []
        if problems:
            raise InvalidArgument("; ".join(str(each) for each in problems[:8]))
        return self._store.change(changed)

    def _delete(self, asked: Asked) -> Asked:
        document = part(asked, "document")
        live = self._store.get(*key_of(document))
        uid = text(document, "metadata", "uid")
        if live is None or (uid and uid != text(live, "metadata", "uid")):
            return {}
        if kind_of(live) in (SERVICE, BENCHMARK):
            try:
                self._store.marked(live)
            except FailedPrecondition:
                self._kubelet.rotate()  # who fills the disk with its log can be deleted
                self._store.marked(live)
        else:
            self._store.remove(live)
        return {}

    def _one(self, asked: Asked) -> Document:
        found = self._get(asked)
        if found is None:
            raise NotFound(f"there is no {text(asked, 'kind')} {text(asked, 'name')}")
        return found

    # What runs

    def _pods(self, asked: Asked) -> list[Document]:
        key = (text(asked, "namespace"), text(asked, "name"))
        if text(asked, "kind") == BENCHMARK:
            run = self._benchmarks.run_of(*key)
            return run.pods() if run is not None else []
        return [each.shown() for each in self._kubelet.of(key)]

    def _told(self, asked: Asked) -> list[Document]:
        return self._events.of({each for each in items(asked, "uids") if isinstance(each, str)})

    def _progress(self, asked: Asked) -> list[Asked]:
        return [asdict(each) for each in self._kubelet.progress(self._one(asked))]

    def _all_facts(self, asked: Asked) -> Asked:
        facts = self._controller.facts
        return {
            "documents": [*facts.runtimes, *facts.models, *facts.weights, *facts.accelerators],
            "capabilities": sorted(facts.capabilities),
            "settings": asdict(facts.settings),
        }

    async def _logs(self, asked: Asked) -> list[Asked]:
        """The last lines of the pods of a service, of one pod, or of a benchmark.

        Of the main container, one by its name, or all.
        """
        service = (text(asked, "namespace"), text(asked, "name"))
        pod, tail = text(asked, "pod"), asked.get("tail")
        lines = min(tail, _MOST_LINES) if isinstance(tail, int) else 100
        found = [each for each in self._kubelet.of(service) if pod in ("", each.name)]
        if not found and not pod:
            there = self._kubelet.replicas.values()
            found = [each for each in there if (each.record.service[0], each.name) == service]
        run = self._benchmarks.run_of(service[0], pod or service[1])
        if run is not None and (not found or text(asked, "kind") == BENCHMARK):
            return [{"pod": name_of(each), "text": run.logs(lines)} for each in run.pods()]
        if not found:
            raise NotFound(
                f"{service[1]} has no pods{f' named {pod}' if pod else ''} on this machine: look at `headrace get isvc`"
            )
        previous, every = asked.get("previous") is True, asked.get("every") is True
        told: list[Asked] = []
        for each in found:
            for container in each.containers if every else [each.named(text(asked, "container"))]:
                name = f"{each.name}/{container.name}" if every else each.name
                told.append({"pod": name, "text": await container.logs(lines, previous)})
        return told

    def _scale(self, asked: Asked) -> Document:
        replicas = asked.get("replicas")
        if not isinstance(replicas, int) or isinstance(replicas, bool):
            raise InvalidArgument("replicas are a whole number")
        service = (text(asked, "namespace"), text(asked, "name"))
        return self._controller.scale(service, text(asked, "component") or "engine", replicas)

    def _replicas(self, asked: Asked) -> Document | Awaitable[Document]:
        """How many there are; with `known`, as soon as there are others."""
        service = (text(asked, "namespace"), text(asked, "name"))
        component = text(asked, "component") or "engine"
        if "known" not in asked:
            return self._controller.replicas(service, component)
        return self._controller.questions.ask(service, component, part(asked, "known"))

    def _woken(self, asked: Asked) -> Asked:
        """A router tells of a cold start."""
        told = part(asked, "parts").items()
        parts = {name: each for name, each in told if isinstance(each, int | float) and 0 <= each < _MOST_SECONDS}
        self._controller.woken((text(asked, "namespace"), text(asked, "name")), parts)
        return {}


def _tell(exchange: Exchange, found: Any) -> None:
    exchange.respond(ResponseHead(200, [(CONTENT_TYPE, JSON)]), json.dumps(found, default=str).encode())


def _fail(exchange: Exchange, error: Exception) -> None:
    if not isinstance(error, HeadraceError):
        exchange.fail(error)
        return
    said = json.dumps({"error": error.message, "code": error.code.name}).encode()
    exchange.respond(ResponseHead(HTTP_STATUS[error.code], [(CONTENT_TYPE, JSON)]), said)


async def _tell_later(exchange: Exchange, found: Awaitable[Any]) -> None:
    try:
        _tell(exchange, await found)
    except Exception as error:
        _fail(exchange, error)


def selected(selector: str) -> dict[str, str]:
    """`a=b,c=d` as labels. Raises InvalidArgument."""
    made: dict[str, str] = {}
    for each in selector.split(","):
        name, equal, value = each.strip().partition("=")
        if not each.strip():
            continue
        if not equal or name.endswith("!"):
            raise InvalidArgument(f"a selector is name=value,name=value on this machine: {each.strip()!a} is none")
        made[name.strip()] = value.lstrip("=").strip()
    return made


def _merged(value: Any, change: Any) -> Any:
    """A merge patch, as RFC 7386 has it."""
    if not isinstance(change, dict):
        return change
    made = dict(value) if isinstance(value, dict) else {}
    for name, each in change.items():
        if each is None:
            made.pop(name, None)
        else:
            made[name] = _merged(made.get(name), each)
    return made
