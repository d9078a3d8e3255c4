# SPDX-License-Identifier: Apache-2.0
"""The console of a machine's fleet, served by `headrace up` on a loopback port."""

from __future__ import annotations

import asyncio
import hmac
import inspect
import ipaddress
import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

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
from headrace.net.http.heads import CONTENT_TYPE, JSON, ResponseHead
from headrace.net.http.routes import Routes
from headrace.net.negotiation import NegotiatingProtocol
from headrace.net.server import HttpServer
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.platforms.kubernetes_client.objects import Document, get_int, get_str, name_of
from headrace.programs.console.http import FLEET, PATH, Pages


def row(service: Document) -> dict[str, Any]:
    """Return a row of the services table, with the shares of its revisions."""
    told = asdict(summary(service))
    deleting = bool(get_str(service, "metadata", "deletionTimestamp"))
    shares = [asdict(each) for rollout in rollouts_of(service) if rollout.two for each in rollout.shares]
    return {**told, "verdict": "deleting" if deleting else progress_of(service), "shares": shares}


def detail(service: Document, pods: Sequence[Document], events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return everything about one service."""
    return {
        **row(service),
        "generation": get_int(service, "metadata", "generation"),
        "conditions": [_condition(each) for each in get_mappings(service, "status", "conditions")],
        "components": [_component(service, each) for each in rollouts_of(service)],
        "pods": [pod_json(each) for each in pods],
        "events": events,
    }


def newest(events: Sequence[Document], most: int) -> list[dict[str, Any]]:
    """Return events, newest first."""
    told = [event_json(each) for each in reversed(events)]
    told.sort(key=lambda each: str(each["time"]), reverse=True)
    return told[:most]


def _condition(told: Document) -> dict[str, str]:
    names = {
        "type": "type",
        "status": "status",
        "reason": "reason",
        "message": "message",
        "since": "lastTransitionTime",
    }
    return {name: get_str(told, field) for name, field in names.items()}


def _component(service: Document, rollout: ComponentRollout) -> dict[str, Any]:
    told, name = components_of(service)[rollout.component], rollout.component
    return {
        "name": name,
        "mode": rollout.mode,
        "ready": get_int(told, "readyReplicas") or 0,
        "replicas": get_int(told, "replicas") or 0,
        "least": get_int(service, "spec", name, "minReplicas"),
        "most": get_int(service, "spec", name, "maxReplicas"),
        "url": get_str(told, "url"),
        "rollout": rollout.state,
        "asked": rollout.asked,
        "canary": rollout.two,
        "shares": [asdict(each) for each in rollout.shares],
    }


API = "/console/api"
KEY_FILE = "console.json"
_HEAD = ResponseHead(
    200, [(CONTENT_TYPE, JSON), (b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
)
_EVENTS = 200
_NO_KEY = "open the address that `headrace up` printed, or give what stands behind #key= there"
_DEEDS = {"promote": promotion, "undo": rollback}


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
        one = f"{API}/services/{{namespace}}/{{name}}"
        table: list[tuple[str, str, Callable[[Exchange], Any]]] = [
            ("GET", f"{API}/services", self.services),
            ("GET", f"{API}/events", self.events),
            ("GET", f"{one}/logs", self.logs),
            ("POST", f"{one}/scale", self.scale),
            ("POST", f"{one}/rollout", self.rollout),
            ("GET", one, self.service),
            ("DELETE", one, self.delete),
        ]
        for method, path, work in table:
            routes.add(method, path, self._guarded(work))

    def _guarded(self, work: Callable[[Exchange], Any]) -> Handler:
        def handle(exchange: Exchange) -> None:
            scheme, _, sent = (exchange.head.get(b"authorization") or b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(sent.strip(), self._key):
                raise Unauthenticated(_NO_KEY)
            found = work(exchange)
            if inspect.isawaitable(found):
                task = asyncio.ensure_future(_tell_later(exchange, found))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                _tell(exchange, found)

        return handle

    # Read.

    def services(self, exchange: Exchange) -> Document:
        """List all services."""
        return {**self._control.call("info", {}), "services": [row(each) for each in self._all()]}

    def events(self, exchange: Exchange) -> Document:
        """List the events of all services, newest first."""
        told = [each for service in self._all() for each in self._about(service)]
        return {"events": newest(told, _EVENTS)}

    def service(self, exchange: Exchange) -> Document:
        """Return one service with its replicas and events."""
        live = self._live(exchange)
        return detail(live, self._pods(live), newest(self._about(live), _EVENTS))

    async def logs(self, exchange: Exchange) -> Document:
        """Return the last log lines of its replicas; `pod`, `tail` and `previous` select them."""
        query = dict(parse_qsl(exchange.head.query.decode("latin-1"), max_num_fields=8))
        tail, (namespace, name) = query.get("tail", "200"), exchange.params
        asked = {
            "namespace": namespace,
            "name": name,
            "pod": query.get("pod", ""),
            "tail": int(tail) if tail.isascii() and tail.isdigit() and len(tail) < 7 else 200,
            "previous": query.get("previous") == "true",
        }
        return {"logs": await self._control.call("logs", asked)}

    # Write.

    def scale(self, exchange: Exchange) -> Document:
        """Scale a component."""
        live, asked = self._live(exchange), _document(exchange)
        where = {"namespace": namespace_of(live), "name": name_of(live)}
        scaled: Document = self._control.call(
            "scale", {**where, "component": asked.get("component"), "replicas": asked.get("replicas")}
        )
        return scaled

    def rollout(self, exchange: Exchange) -> Document:
        """Promote or roll back a canary of the service as it was shown."""
        live, asked = self._live(exchange), _document(exchange)
        change = _DEEDS.get(str(asked.get("deed")))
        if change is None:
            raise InvalidArgument(f"deed must be {' or '.join(_DEEDS)}")
        if asked.get("generation") != get_int(live, "metadata", "generation"):
            raise FailedPrecondition(f"{name_of(live)} was changed meanwhile: look at it again")
        component = asked.get("component")
        where = {"kind": SERVICE, "namespace": namespace_of(live), "name": name_of(live)}
        made = change(live, component if isinstance(component, str) else "")
        return row(self._control.call("patch", {**where, "change": made}))

    def delete(self, exchange: Exchange) -> Document:
        """Delete a service; it stays in the list until everything has stopped."""
        self._control.call("delete", {"document": self._live(exchange)})
        return {}

    # Helpers.

    def _all(self) -> list[Document]:
        found: list[Document] = self._control.call("list", {"kind": SERVICE})
        return found

    def _live(self, exchange: Exchange) -> Document:
        namespace, name = exchange.params
        found: Document | None = self._control.call("get", {"kind": SERVICE, "namespace": namespace, "name": name})
        if found is None:
            raise NotFound(f"there is no InferenceService {namespace[:64]}/{name[:64]} on this machine")
        return found

    def _pods(self, service: Document) -> list[Document]:
        asked = {"namespace": namespace_of(service), "name": name_of(service)}
        found: list[Document] = self._control.call("pods", asked)
        return found

    def _about(self, service: Document) -> list[Document]:
        objects = [service, *self._pods(service)]
        uids = [each["metadata"].get("uid") for each in objects]
        found: list[Document] = self._control.call("events", {"uids": uids})
        return found


def _tell(exchange: Exchange, found: Document) -> None:
    exchange.respond(_HEAD, json.dumps(found, default=str).encode())


async def _tell_later(exchange: Exchange, found: Awaitable[Document]) -> None:
    try:
        _tell(exchange, await found)
    except Exception as error:
        exchange.fail(error)


class FleetDoor:
    """The console on a port. `fixed`: exactly this port; otherwise another one if it is taken."""

    def __init__(self, address: Address, *, fixed: bool) -> None:
        self._address = address
        self._fixed = fixed
        self.url = ""
        """The URL with the key, once it is open."""

    async def open(self, control: ApiServer, folder: Path) -> HttpServer:
        """Listen. Raises FailedPrecondition if that is impossible."""
        key = kept_key(folder)
        try:
            server = server_of(control, key, self._address)
            await server.start()
        except FailedPrecondition:
            if self._fixed:
                raise
            server = server_of(control, key, Address(self._address.host, 0))
            await server.start()
        self.url = f"http://{server.address}{PATH}#key={key}"
        return server


def server_of(control: ApiServer, key: str, address: Address) -> HttpServer:
    """Return a server of the console, not started."""
    routes = Routes()
    FleetConsole(control, key).add_to(routes)
    site = Site(routes)
    return HttpServer(site, address, partial(NegotiatingProtocol, site))


def loopback(text: str) -> Address:
    """Parse a loopback address. Raises InvalidArgument."""
    address = Address.parse(text)
    try:
        private = ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        private = address.host == "localhost"
    if not private:
        raise InvalidArgument(
            f"--console {text}: the fleet is of this machine alone, so give 127.0.0.1:PORT; from elsewhere, "
            "`ssh -L 8079:127.0.0.1:8079` brings it to you"
        )
    return address


def kept_key(folder: Path) -> str:
    """Return the key of this fleet: the same at every start, so that an open page stays valid."""
    file = folder / KEY_FILE
    kept = (read_json(file) or {}).get("key")
    if isinstance(kept, str) and len(kept) >= 32:
        return kept
    made = secrets.token_urlsafe(32)
    write_json(file, {"key": made})
    return made


def _document(exchange: Exchange) -> dict[str, Any]:
    try:
        found = json.loads(bytes(exchange.body) or b"{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidArgument("the body must be a JSON object")
    return found
