# SPDX-License-Identifier: Apache-2.0
"""The API server of the daemon: HTTP on a UNIX socket that only its owner may open. `POST /v1/VERB` with JSON, JSON back.

`api_client` calls it. It stores what a verb changes; the controller reacts to that by itself.
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
from headrace.fleet.local.benchmark_controller import BENCHMARK, BenchmarkController
from headrace.fleet.local.controller import Controller
from headrace.fleet.local.events import Events
from headrace.fleet.local.kubelet import Kubelet
from headrace.fleet.local.object_store import CORE, DocumentStore, is_supported, key_of
from headrace.fleet.local.settings import SOCKET, LocalSettings
from headrace.fleet.names import SERVICE
from headrace.net.http.heads import CONTENT_TYPE, HTTP_STATUS, JSON, ResponseHead
from headrace.net.http.routes import Routes
from headrace.net.negotiation import NegotiatingProtocol
from headrace.net.server import HttpServer
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.platforms.kubernetes_client.objects import Document, get_list, get_mapping, get_str, kind_of, name_of
from headrace.version import __version__

if TYPE_CHECKING:
    from headrace.net.http.exchange import Exchange

log = logging.getLogger("headrace.fleet")

Arguments = dict[str, Any]
_MAX_LINES = 100_000
_MAX_SECONDS = 1e6


class ApiServer:
    """The verbs of the API."""

    def __init__(
        self,
        settings: LocalSettings,
        store: DocumentStore,
        kubelet: Kubelet,
        controller: Controller,
        benchmarks: BenchmarkController,
        events: Events,
    ) -> None:
        self._settings = settings
        self._store = store
        self._kubelet = kubelet
        self._controller = controller
        self._benchmarks = benchmarks
        self._events = events
        self._tasks: set[asyncio.Task[None]] = set()
        self._verbs: dict[str, Callable[[Arguments], Any]] = {
            "info": self._get_info,
            "list": self._list,
            "get": self._get,
            "apply": self._apply,
            "patch": self._patch,
            "delete": self._delete,
            "pods": self._pods,
            "events": self._list_events,
            "progress": self._progress,
            "facts": self._get_facts,
            "logs": self._logs,
            "scale": self._scale,
            "replicas": self._replicas,
            "replica_metrics": self._replica_metrics,
            "router_statuses": self._router_statuses,
            "woken": self._cold_start,
        }

    def server(self) -> HttpServer:
        """Return a server of the verbs, not started yet."""
        routes = Routes()
        routes.add("POST", "/v1/{verb}", self._handle)
        site = Site(routes)
        address = Address.parse(f"unix:{self._settings.root / SOCKET}")
        return HttpServer(site, address, partial(NegotiatingProtocol, site), unix_mode=0o600)

    def call(self, verb: str, args: Arguments) -> Any:
        """Run a verb in this process; return its result, or an awaitable of it. Raises classes of `core.errors`."""
        work = self._verbs.get(verb)
        if work is None:
            raise NotFound(f"unknown verb {verb[:32]!a}: does the client have another version?")
        return work(args)

    def _handle(self, exchange: Exchange) -> None:
        try:
            result = self._call(exchange)
            if not inspect.isawaitable(result):
                _respond(exchange, result)
                return
        except Exception as error:
            _fail(exchange, error)
            return
        task = asyncio.ensure_future(_respond_later(exchange, result))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _call(self, exchange: Exchange) -> Any:
        try:
            args = json.loads(bytes(exchange.body) or b"{}")
        except (ValueError, RecursionError):
            raise InvalidArgument("the request is not JSON, or is nested too deeply") from None
        if not isinstance(args, dict):
            raise InvalidArgument("the request is not a JSON object")
        try:
            return self.call(exchange.params[0], args)
        except RecursionError:  # free-form fields of a document may be deeper than a recursive function can go
            raise InvalidArgument("the request is nested too deeply") from None

    # Documents

    def _get_info(self, args: Arguments) -> Arguments:
        return {"version": __version__, "root": str(self._settings.root), "node": self._settings.node}

    def _list(self, args: Arguments) -> list[Document]:
        selector = parse_selector(get_str(args, "selector"))
        return self._store.all(get_str(args, "kind"), get_str(args, "namespace"), selector)

    def _get(self, args: Arguments) -> Document | None:
        return self._store.get(get_str(args, "kind"), get_str(args, "namespace"), get_str(args, "name"))

    def _apply(self, args: Arguments) -> Arguments:
        document = get_mapping(args, "document")
        if not is_supported(document):
            raise InvalidArgument(
                f"{kind_of(document) or 'a document without a kind'} is not supported by the local fleet: it has the "
                f"kinds of ome.io, and {', '.join(sorted(CORE))}"
            )
        problems = schema.validate(document) if kind_of(document) not in CORE else []
        if problems:
            raise InvalidArgument("; ".join(str(problem) for problem in problems[:8]))
        before = self._store.get(*key_of(document))
        if before is not None and get_str(before, "metadata", "deletionTimestamp"):
            raise FailedPrecondition(f"{name_of(document)} is being deleted: apply it when it is gone")
        stored, change = self._store.apply(document, dry_run=args.get("dry_run") is True)
        answer: Change = "created" if change == "created" else "configured" if change == "configured" else "unchanged"
        return {"document": stored, "change": answer}

    def _patch(self, args: Arguments) -> Document:
        live = self._require(args)
        change = get_mapping(args, "change")
        if self._store.edited_since(live, get_str(change, "metadata", "resourceVersion")):
            raise FailedPrecondition(f"{name_of(live)} was changed meanwhile: read it again")
        metadata = {
            name: value for name, value in get_mapping(change, "metadata").items() if name in ("labels", "annotations")
        }
        patch = {name: value for name, value in change.items() if name in ("spec", "data")}
        if metadata:
            patch["metadata"] = metadata
        changed = _merge_patch(live, patch)
        problems = schema.validate(changed) if kind_of(live) not in CORE else []
        if problems:
            raise InvalidArgument("; ".join(str(problem) for problem in problems[:8]))
        return self._store.update(changed)

    def _delete(self, args: Arguments) -> Arguments:
        document = get_mapping(args, "document")
        live = self._store.get(*key_of(document))
        uid = get_str(document, "metadata", "uid")
        if live is None or (uid and uid != get_str(live, "metadata", "uid")):
            return {}
        if kind_of(live) in (SERVICE, BENCHMARK):
            try:
                self._store.mark_deleted(live)
            except FailedPrecondition:
                self._kubelet.rotate_logs()  # a service whose log filled the disk can be deleted
                self._store.mark_deleted(live)
        else:
            self._store.remove(live)
        return {}

    def _require(self, args: Arguments) -> Document:
        document = self._get(args)
        if document is None:
            raise NotFound(f"there is no {get_str(args, 'kind')} {get_str(args, 'name')}")
        return document

    # Pods, events and replicas

    def _pods(self, args: Arguments) -> list[Document]:
        key = (get_str(args, "namespace"), get_str(args, "name"))
        if get_str(args, "kind") == BENCHMARK:
            job = self._benchmarks.job_of(*key)
            return job.pods() if job is not None else []
        return [pod.to_document() for pod in self._kubelet.pods_of(key)]

    def _list_events(self, args: Arguments) -> list[Document]:
        return self._events.about({uid for uid in get_list(args, "uids") if isinstance(uid, str)})

    def _progress(self, args: Arguments) -> list[Arguments]:
        return [asdict(progress) for progress in self._kubelet.progress(self._require(args))]

    def _get_facts(self, args: Arguments) -> Arguments:
        facts = self._controller.facts
        return {
            "documents": [*facts.runtimes, *facts.models, *facts.weights, *facts.accelerators],
            "capabilities": sorted(facts.capabilities),
            "settings": asdict(facts.settings),
        }

    async def _logs(self, args: Arguments) -> list[Arguments]:
        """Return the last lines of the pods of a service, of one pod, or of a benchmark.

        Of the main container, a named one, or all.
        """
        service = (get_str(args, "namespace"), get_str(args, "name"))
        pod_name, tail = get_str(args, "pod"), args.get("tail")
        lines = min(tail, _MAX_LINES) if isinstance(tail, int) else 100
        pods = [pod for pod in self._kubelet.pods_of(service) if pod_name in ("", pod.name)]
        if not pods and not pod_name:
            all_pods = self._kubelet.pods.values()
            pods = [pod for pod in all_pods if (pod.record.service[0], pod.name) == service]
        job = self._benchmarks.job_of(service[0], pod_name or service[1])
        if job is not None and (not pods or get_str(args, "kind") == BENCHMARK):
            return [{"pod": name_of(pod), "text": job.logs(lines)} for pod in job.pods()]
        if not pods:
            raise NotFound(
                f"{service[1]} has no pods{f' named {pod_name}' if pod_name else ''} here: see `headrace get isvc`"
            )
        previous, every = args.get("previous") is True, args.get("every") is True
        answer: list[Arguments] = []
        for pod in pods:
            for container in pod.containers if every else [pod.container(get_str(args, "container"))]:
                name = f"{pod.name}/{container.name}" if every else pod.name
                answer.append({"pod": name, "text": await container.logs(lines, previous)})
        return answer

    def _scale(self, args: Arguments) -> Document:
        replicas = args.get("replicas")
        if not isinstance(replicas, int) or isinstance(replicas, bool):
            raise InvalidArgument("replicas must be an integer")
        service = (get_str(args, "namespace"), get_str(args, "name"))
        component = get_str(args, "component") or "engine"
        return self._controller.scale(service, component, replicas, get_str(args, "reason"))

    def _router_statuses(self, args: Arguments) -> Awaitable[list[Document]]:
        return self._controller.router_statuses((get_str(args, "namespace"), get_str(args, "name")))

    def _replica_metrics(self, args: Arguments) -> Awaitable[Document]:
        return self._controller.replica_metrics((get_str(args, "namespace"), get_str(args, "name")))

    def _replicas(self, args: Arguments) -> Document | Awaitable[Document]:
        """Return the replica counts; with `known`, as soon as they differ."""
        service = (get_str(args, "namespace"), get_str(args, "name"))
        component = get_str(args, "component") or "engine"
        if "known" not in args:
            return self._controller.replicas(service, component)
        return self._controller.watches.wait(service, component, get_mapping(args, "known"))

    def _cold_start(self, args: Arguments) -> Arguments:
        """Record a cold start that a router reports."""
        items = get_mapping(args, "parts").items()
        parts = {
            name: seconds for name, seconds in items if isinstance(seconds, int | float) and 0 <= seconds < _MAX_SECONDS
        }
        self._controller.record_cold_start((get_str(args, "namespace"), get_str(args, "name")), parts)
        return {}


def _respond(exchange: Exchange, result: Any) -> None:
    exchange.respond(ResponseHead(200, [(CONTENT_TYPE, JSON)]), json.dumps(result, default=str).encode())


def _fail(exchange: Exchange, error: Exception) -> None:
    if not isinstance(error, HeadraceError):
        exchange.fail(error)
        return
    body = json.dumps({"error": error.message, "code": error.code.name}).encode()
    exchange.respond(ResponseHead(HTTP_STATUS[error.code], [(CONTENT_TYPE, JSON)]), body)


async def _respond_later(exchange: Exchange, result: Awaitable[Any]) -> None:
    try:
        _respond(exchange, await result)
    except Exception as error:
        _fail(exchange, error)


def parse_selector(selector: str) -> dict[str, str]:
    """Return the labels of a selector `a=b,c=d`. Raises InvalidArgument."""
    labels: dict[str, str] = {}
    for term in selector.split(","):
        name, equal, value = term.strip().partition("=")
        if not term.strip():
            continue
        if not equal or name.endswith("!"):
            raise InvalidArgument(f"{term.strip()!a} is not a selector: the local fleet supports name=value,name=value")
        labels[name.strip()] = value.lstrip("=").strip()
    return labels


def _merge_patch(value: Any, change: Any) -> Any:
    """Apply a JSON merge patch (RFC 7386)."""
    if not isinstance(change, dict):
        return change
    merged = dict(value) if isinstance(value, dict) else {}
    for name, item in change.items():
        if item is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge_patch(merged.get(name), item)
    return merged
