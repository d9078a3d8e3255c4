# SPDX-License-Identifier: Apache-2.0
"""The console of a machine's fleet: `headrace up` serves it on a loopback port, beside the daemon's UNIX socket.

Made by `headrace up`. The socket is safe because only its owner can open it, and a browser cannot. So there is a key, which
lies in the fleet's folder for its owner alone and is told in the address that `headrace up` prints, behind the `#`, which no
browser sends. All but the page itself needs it, in a header: no other user of this machine has it, nor any page of others.
What each call means is the daemon's; here it is asked, and told as a page wants it.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import ipaddress
import json
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from headrace.core.errors import FailedPrecondition, InvalidArgument, NotFound, Unauthenticated
from headrace.fleet.client.kinds import SERVICE
from headrace.fleet.client.rollouts import promotion, rollback
from headrace.fleet.local.control import Control
from headrace.fleet.local.store import read_json, write_json
from headrace.fleet.words import Document, name_of, namespace_of, whole
from headrace.net.http.exchange import Exchange, Handler
from headrace.net.http.heads import CONTENT_TYPE, JSON, ResponseHead
from headrace.net.http.routes import Routes
from headrace.net.negotiation import NegotiatingProtocol
from headrace.net.server import WireServer
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.programs.console.fleet_view import detail, newest, row
from headrace.programs.console.pages import FLEET, PATH, Pages

API = "/console/api"
KEY_FILE = "console.json"
_HEAD = ResponseHead(
    200, [(CONTENT_TYPE, JSON), (b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
)
_EVENTS = 200
_NO_KEY = "open the address that `headrace up` printed, or give what stands behind #key= there"
_DEEDS = {"promote": promotion, "undo": rollback}


class FleetConsole:
    """Handlers over one daemon."""

    def __init__(self, control: Control, key: str) -> None:
        self._control = control
        self._key = key.encode()
        self._pages = Pages(FLEET)
        self._tasks: set[asyncio.Future[None]] = set()

    def add_to(self, routes: Routes) -> None:
        """Serve the paths."""
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

    # What there is

    def services(self, exchange: Exchange) -> Document:
        """All services, a row each."""
        return {**self._control.do("info", {}), "services": [row(each) for each in self._all()]}

    def events(self, exchange: Exchange) -> Document:
        """What happened to all of them, the newest first."""
        told = [each for service in self._all() for each in self._about(service)]
        return {"events": newest(told, _EVENTS)}

    def service(self, exchange: Exchange) -> Document:
        """One, with its replicas and events."""
        live = self._live(exchange)
        return detail(live, self._pods(live), newest(self._about(live), _EVENTS))

    async def logs(self, exchange: Exchange) -> Document:
        """The last lines of its replicas; `pod`, `tail` and `previous` say of which, how many, of which process."""
        query = dict(parse_qsl(exchange.head.query.decode("latin-1"), max_num_fields=8))
        tail, (namespace, name) = query.get("tail", "200"), exchange.params
        asked = {
            "namespace": namespace,
            "name": name,
            "pod": query.get("pod", ""),
            "tail": int(tail) if tail.isascii() and tail.isdigit() and len(tail) < 7 else 200,
            "previous": query.get("previous") == "true",
        }
        return {"logs": await self._control.do("logs", asked)}

    # What is asked for

    def scale(self, exchange: Exchange) -> Document:
        """Another number of replicas of a component."""
        live, asked = self._live(exchange), _document(exchange)
        where = {"namespace": namespace_of(live), "name": name_of(live)}
        scaled: Document = self._control.do(
            "scale", {**where, "component": asked.get("component"), "replicas": asked.get("replicas")}
        )
        return scaled

    def rollout(self, exchange: Exchange) -> Document:
        """A canary promoted or taken back, of the service as it was looked at."""
        live, asked = self._live(exchange), _document(exchange)
        change = _DEEDS.get(str(asked.get("deed")))
        if change is None:
            raise InvalidArgument(f"deed must be {' or '.join(_DEEDS)}")
        if asked.get("generation") != whole(live, "metadata", "generation"):
            raise FailedPrecondition(f"{name_of(live)} was changed meanwhile: look at it again")
        component = asked.get("component")
        where = {"kind": SERVICE, "namespace": namespace_of(live), "name": name_of(live)}
        made = change(live, component if isinstance(component, str) else "")
        return row(self._control.do("patch", {**where, "change": made}))

    def delete(self, exchange: Exchange) -> Document:
        """Begin to end a service; it is in the list until nothing is left of it."""
        self._control.do("delete", {"document": self._live(exchange)})
        return {}

    # Inside

    def _all(self) -> list[Document]:
        found: list[Document] = self._control.do("list", {"kind": SERVICE})
        return found

    def _live(self, exchange: Exchange) -> Document:
        namespace, name = exchange.params
        found: Document | None = self._control.do("get", {"kind": SERVICE, "namespace": namespace, "name": name})
        if found is None:
            raise NotFound(f"there is no InferenceService {namespace[:64]}/{name[:64]} on this machine")
        return found

    def _pods(self, service: Document) -> list[Document]:
        asked = {"namespace": namespace_of(service), "name": name_of(service)}
        found: list[Document] = self._control.do("pods", asked)
        return found

    def _about(self, service: Document) -> list[Document]:
        objects = [service, *self._pods(service)]
        uids = [each["metadata"].get("uid") for each in objects]
        found: list[Document] = self._control.do("events", {"uids": uids})
        return found


def _tell(exchange: Exchange, found: Document) -> None:
    exchange.respond(_HEAD, json.dumps(found, default=str).encode())


async def _tell_later(exchange: Exchange, found: Awaitable[Document]) -> None:
    try:
        _tell(exchange, await found)
    except Exception as error:
        exchange.fail(error)


class FleetDoor:
    """The console on a port. `fixed`: that one or none; else another one where it is taken."""

    def __init__(self, address: Address, *, fixed: bool) -> None:
        self._address = address
        self._fixed = fixed
        self.url = ""
        """With the key, once it is open."""

    async def open(self, control: Control, folder: Path) -> WireServer:
        """Listen. Raises FailedPrecondition where that cannot be."""
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


def server_of(control: Control, key: str, address: Address) -> WireServer:
    """A server of the console, not started yet."""
    routes = Routes()
    FleetConsole(control, key).add_to(routes)
    site = Site(routes)
    return WireServer(site, address, partial(NegotiatingProtocol, site))


def loopback(text: str) -> Address:
    """An address that only this machine can connect to. Raises InvalidArgument."""
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
    """The key of this fleet: the same at every start, so that a page that is open stays good."""
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
