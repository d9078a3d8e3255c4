# SPDX-License-Identifier: Apache-2.0
"""The console of a machine's fleet, served by `headrace up` on a loopback port."""

from __future__ import annotations

import asyncio
import hmac
import inspect
import ipaddress
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from headrace.core.errors import FailedPrecondition, InvalidArgument, NotFound, Unauthenticated
from headrace.core.files import read_json, write_json
from headrace.fleet.client.describe import event_json, pod_json
from headrace.fleet.client.rollouts import ComponentRollout, promotion, rollback, rollouts_of
from headrace.fleet.client.tables import components_of, progress_of, summary
from headrace.fleet.documents import namespace_of
from headrace.fleet.local.api_server import ApiServer
from headrace.fleet.names import SERVICE
from headrace.fleet.status.conditions import get_mappings
from headrace.net.http.exchange import Exchange, Handler
from headrace.net.http.heads import CONTENT_TYPE, JSON, ResponseHead, parse_query
from headrace.net.http.routes import Routes
from headrace.net.negotiation import NegotiatingProtocol
from headrace.net.server import HttpServer
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.platforms.kubernetes_client.objects import Document, get_int, get_str, name_of
from headrace.programs.console.http import FLEET, PATH, Pages


def row(service: Document) -> dict[str, Any]:
    """Return a row of the services table, with the shares of its revisions."""
    columns = asdict(summary(service))
    deleting = bool(get_str(service, "metadata", "deletionTimestamp"))
    shares = [asdict(share) for rollout in rollouts_of(service) if rollout.two for share in rollout.shares]
    return {**columns, "verdict": "deleting" if deleting else progress_of(service), "shares": shares}


_ROLLOUT_EVENTS = ("Rollout", "RevisionCreated", "TrafficChanged")
_SCALING_EVENTS = (
    "Scaled",
    "SuccessfulRescale",
    "ColdStart",
    "ValidMetricFound",
    "NotCounted",
    "NoMetric",
    "NoResourceRequest",
    "InvalidAnnotation",
    "UnsupportedQuery",
)


def detail(
    service: Document, pods: Sequence[Document], events: list[dict[str, Any]], metrics: Mapping[str, Document]
) -> dict[str, Any]:
    """Return everything about one service. `metrics`: requests, CPU and memory of each replica."""
    return {
        **row(service),
        "generation": get_int(service, "metadata", "generation"),
        "conditions": [_condition(condition) for condition in get_mappings(service, "status", "conditions")],
        "components": [_component(service, rollout) for rollout in rollouts_of(service)],
        "pods": [{**pod_json(pod), "metrics": metrics.get(name_of(pod), {})} for pod in pods],
        "rollouts": [event for event in events if event["reason"].startswith(_ROLLOUT_EVENTS)],
        "scaling": [event for event in events if event["reason"] in _SCALING_EVENTS],
        "events": events,
    }


def failures_text(statuses: Sequence[Document]) -> str:
    """Return how the routers of a service met failures, in a sentence; "" without routers."""
    if not statuses:
        return ""
    backends = [backend for status in statuses for backend in status.get("backends", ())]

    def total(section: str, key: str) -> int:
        return sum(int(status.get(section, {}).get(key, 0)) for status in statuses)

    ejected = sum(backend.get("ejected_times", 0) for backend in backends)
    checks = sum(backend.get("failed_checks", 0) for backend in backends)
    slow = sum(backend.get("slow_start", 1.0) < 1.0 for backend in backends)
    parts = [
        f"{ejected} ejections",
        f"{checks} failed checks",
        f"{total('retries', 'spent')} retries ({total('retries', 'refused')} beyond the budget)",
    ]
    if any(status.get("hedges") for status in statuses):
        parts.append(f"{total('hedges', 'asked')} hedged requests ({total('hedges', 'won')} answered first)")
    parts.append(f"{slow} of {len(backends)} replicas in slow start")
    return ", ".join(parts)


def newest(events: Sequence[Document], limit: int) -> list[dict[str, Any]]:
    """Return events, newest first."""
    documents = [event_json(event) for event in reversed(events)]
    documents.sort(key=lambda document: str(document["time"]), reverse=True)
    return documents[:limit]


def _condition(condition: Document) -> dict[str, str]:
    names = {
        "type": "type",
        "status": "status",
        "reason": "reason",
        "message": "message",
        "since": "lastTransitionTime",
    }
    return {name: get_str(condition, field) for name, field in names.items()}


def _component(service: Document, rollout: ComponentRollout) -> dict[str, Any]:
    component, name = components_of(service)[rollout.component], rollout.component
    return {
        "name": name,
        "mode": rollout.mode,
        "ready": get_int(component, "readyReplicas") or 0,
        "replicas": get_int(component, "replicas") or 0,
        "least": get_int(service, "spec", name, "minReplicas"),
        "most": get_int(service, "spec", name, "maxReplicas"),
        "url": get_str(component, "url"),
        "rollout": rollout.state,
        "asked": rollout.requested_percent,
        "canary": rollout.two,
        "shares": [asdict(share) for share in rollout.shares],
    }


API = "/console/api"
KEY_FILE = "console.json"
_HEAD = ResponseHead(
    200, [(CONTENT_TYPE, JSON), (b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
)
_EVENTS = 200
_NO_KEY = "open the URL that `headrace up` printed, or enter the key after #key= in it"
_ROLLOUT_ACTIONS = {"promote": promotion, "undo": rollback}


class FleetConsole:
    """Handlers over one fleet daemon."""

    def __init__(self, control: ApiServer, key: str) -> None:
        self._control = control
        self._key = key.encode()
        self._pages = Pages(FLEET)
        self._tasks: set[asyncio.Future[None]] = set()

    def add_to(self, routes: Routes) -> None:
        """Add the routes."""
        self._pages.add_to(routes)
        service_path = f"{API}/services/{{namespace}}/{{name}}"
        table: list[tuple[str, str, Callable[[Exchange], Any]]] = [
            ("GET", f"{API}/services", self.services),
            ("GET", f"{API}/events", self.events),
            ("GET", f"{service_path}/logs", self.logs),
            ("POST", f"{service_path}/scale", self.scale),
            ("POST", f"{service_path}/rollout", self.rollout),
            ("GET", service_path, self.service),
            ("DELETE", service_path, self.delete),
        ]
        for method, path, handler in table:
            routes.add(method, path, self._with_key_check(handler))

    def _with_key_check(self, handler: Callable[[Exchange], Any]) -> Handler:
        def handle(exchange: Exchange) -> None:
            scheme, _, sent = (exchange.head.get(b"authorization") or b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(sent.strip(), self._key):
                raise Unauthenticated(_NO_KEY)
            result = handler(exchange)
            if inspect.isawaitable(result):
                task = asyncio.ensure_future(_respond_later(exchange, result))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                _respond(exchange, result)

        return handle

    # Read.

    def services(self, exchange: Exchange) -> Document:
        """List all services."""
        return {**self._control.call("info", {}), "services": [row(service) for service in self._services()]}

    def events(self, exchange: Exchange) -> Document:
        """List the events of all services, newest first."""
        events = [event for service in self._services() for event in self._events_of(service)]
        return {"events": newest(events, _EVENTS)}

    def service(self, exchange: Exchange) -> Awaitable[Document]:
        """Return one service with its replicas, their metrics, and its events."""
        return self._detail(self._service(exchange))

    async def _detail(self, live: Document) -> Document:
        reference = {"namespace": namespace_of(live), "name": name_of(live)}
        metrics: dict[str, Document] = await self._control.call("replica_metrics", reference)
        found = detail(live, self._pods(live), newest(self._events_of(live), _EVENTS), metrics)
        return {**found, "failures": failures_text(await self._control.call("router_statuses", reference))}

    async def logs(self, exchange: Exchange) -> Document:
        """Return the last log lines of its replicas; `pod`, `tail` and `previous` select them."""
        query = parse_query(exchange.head.query)
        tail, (namespace, name) = query.get("tail", "200"), exchange.params
        arguments = {
            "namespace": namespace,
            "name": name,
            "pod": query.get("pod", ""),
            "tail": int(tail) if tail.isascii() and tail.isdigit() and len(tail) < 7 else 200,
            "previous": query.get("previous") == "true",
        }
        return {"logs": await self._control.call("logs", arguments)}

    # Write.

    def scale(self, exchange: Exchange) -> Document:
        """Scale a component."""
        live, body = self._service(exchange), _document(exchange)
        reference = {"namespace": namespace_of(live), "name": name_of(live)}
        scaled: Document = self._control.call(
            "scale", {**reference, "component": body.get("component"), "replicas": body.get("replicas")}
        )
        return scaled

    def rollout(self, exchange: Exchange) -> Document:
        """Promote or roll back a canary of the service as it was shown."""
        live, body = self._service(exchange), _document(exchange)
        change = _ROLLOUT_ACTIONS.get(str(body.get("deed")))
        if change is None:
            raise InvalidArgument(f"deed must be {' or '.join(_ROLLOUT_ACTIONS)}")
        if body.get("generation") != get_int(live, "metadata", "generation"):
            raise FailedPrecondition(f"{name_of(live)} was changed meanwhile: reload it and try again")
        component = body.get("component")
        reference = {"kind": SERVICE, "namespace": namespace_of(live), "name": name_of(live)}
        patch = change(live, component if isinstance(component, str) else "")
        return row(self._control.call("patch", {**reference, "change": patch}))

    def delete(self, exchange: Exchange) -> Document:
        """Delete a service; it stays in the list until everything has stopped."""
        self._control.call("delete", {"document": self._service(exchange)})
        return {}

    # Helpers.

    def _services(self) -> list[Document]:
        services: list[Document] = self._control.call("list", {"kind": SERVICE})
        return services

    def _service(self, exchange: Exchange) -> Document:
        namespace, name = exchange.params
        service: Document | None = self._control.call("get", {"kind": SERVICE, "namespace": namespace, "name": name})
        if service is None:
            raise NotFound(f"there is no InferenceService {namespace[:64]}/{name[:64]} on this machine")
        return service

    def _pods(self, service: Document) -> list[Document]:
        arguments = {"namespace": namespace_of(service), "name": name_of(service)}
        pods: list[Document] = self._control.call("pods", arguments)
        return pods

    def _events_of(self, service: Document) -> list[Document]:
        objects = [service, *self._pods(service)]
        uids = [document["metadata"].get("uid") for document in objects]
        events: list[Document] = self._control.call("events", {"uids": uids})
        return events


def _respond(exchange: Exchange, result: Document) -> None:
    exchange.respond(_HEAD, json.dumps(result, default=str).encode())


async def _respond_later(exchange: Exchange, result: Awaitable[Document]) -> None:
    try:
        _respond(exchange, await result)
    except Exception as error:
        exchange.fail(error)


class ConsoleListener:
    """Serves the console on a port; if it is taken, on another one, unless `fixed`."""

    def __init__(self, address: Address, *, fixed: bool) -> None:
        self._address = address
        self._fixed = fixed
        self.url = ""
        """The URL with the key, once the port is open."""

    async def open(self, control: ApiServer, folder: Path) -> HttpServer:
        """Listen. Raises FailedPrecondition if that is impossible."""
        key = load_key(folder)
        try:
            server = build_server(control, key, self._address)
            await server.start()
        except FailedPrecondition:
            if self._fixed:
                raise
            server = build_server(control, key, Address(self._address.host, 0))
            await server.start()
        self.url = f"http://{server.address}{PATH}#key={key}"
        return server


def build_server(control: ApiServer, key: str, address: Address) -> HttpServer:
    """Return a server of the console; the caller starts it."""
    routes = Routes()
    FleetConsole(control, key).add_to(routes)
    site = Site(routes)
    return HttpServer(site, address, partial(NegotiatingProtocol, site))


def parse_loopback(text: str) -> Address:
    """Parse a loopback address. Raises InvalidArgument."""
    address = Address.parse(text)
    try:
        private = ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        private = address.host == "localhost"
    if not private:
        raise InvalidArgument(
            f"--console {text}: only this machine can use the console, so give 127.0.0.1:PORT; from another machine, "
            "use `ssh -L 8079:127.0.0.1:8079`"
        )
    return address


def load_key(folder: Path) -> str:
    """Return the key of this fleet. It is saved, so that an open page stays valid after a restart."""
    file = folder / KEY_FILE
    key = (read_json(file) or {}).get("key")
    if isinstance(key, str) and len(key) >= 32:
        return key
    key = secrets.token_urlsafe(32)
    write_json(file, {"key": key})
    return key


def _document(exchange: Exchange) -> dict[str, Any]:
    try:
        body = json.loads(bytes(exchange.body) or b"{}")
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise InvalidArgument("the body must be a JSON object")
    return body
