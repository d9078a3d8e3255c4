# SPDX-License-Identifier: Apache-2.0
"""Requests that a client would have the server make (test 10): a resolver that changes its mind, and stores of users.

The rules of `fetch` are held by `tests/models/storage/test_fetching.py`, that nothing else fetches by its last test,
media by `tests/models/media/test_media_reader.py`. Here the system's own resolver lies, so that a second look-up anywhere
would be seen.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_api import ORG, Api, job_api
from web_stub import WebStub, serve

from headrace.core.errors import HeadraceError, InvalidArgument
from headrace.models.media.reader import MediaReader
from headrace.models.media.settings import MediaSettings
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.fetch import fetch_location
from headrace.models.storage.http_download import FetchPolicy, fetch
from headrace.models.storage.locations import ObjectLocation, parse_location
from headrace.models.storage.object_stores import ObjectLimits, ObjectSource

PUBLIC = "8.8.8.8"


class Rebinding:
    """A name's first address is public and its next ones are ours: where does the server connect to?"""

    def __init__(self, patch: pytest.MonkeyPatch, first: str = PUBLIC, then: str = "127.0.0.1") -> None:
        self.asked: list[str] = []
        self.connected: list[str] = []
        self._answers = [first, then]
        result = self

        class Noted(socket.socket):
            def connect(self, address: Any) -> None:
                result.connected.append(address[0])
                if address[0] == PUBLIC:
                    raise ConnectionRefusedError
                super().connect(address)

        patch.setattr(socket, "socket", Noted)
        patch.setattr(socket, "getaddrinfo", self.getaddrinfo)

    def getaddrinfo(self, host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        self.asked.append(host)
        address = self._answers[min(len(self.asked), len(self._answers)) - 1]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]


@pytest.fixture
def inside() -> Iterator[WebStub]:
    """Something on this machine that nobody outside may read."""
    with WebStub({"/latest/meta-data": serve(b"the machine's own credentials")}) as web:
        yield web


@pytest.mark.parametrize("way", ["fetch", "media", "model"])
def test_a_name_that_moves_to_this_machine_is_not_followed(
    way: str, inside: WebStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = inside.url("/latest/meta-data", "rebind.example")
    resolver = Rebinding(monkeypatch)
    with pytest.raises(HeadraceError):
        if way == "fetch":
            fetch(url, tmp_path / "file", FetchPolicy(idle_seconds=5))
        elif way == "model":
            fetch_location(parse_location(url), tmp_path)
        else:
            reader = MediaReader(MediaSettings())
            try:
                asyncio.run(reader.picture(url))
            finally:
                reader.close()
    assert resolver.asked == ["rebind.example"]
    assert set(resolver.connected) == {PUBLIC}
    assert inside.seen == []


def test_the_resolver_of_this_test_would_lead_inside(inside: WebStub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the tests above would show nothing."""
    Rebinding(monkeypatch)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("rebind.example", inside.port))
    with socket.create_connection(("rebind.example", inside.port)) as sock:
        assert sock.getpeername()[0] == "127.0.0.1"


# Stores that users name


def credentials(endpoint: str) -> CloudCredentials:
    keys = {"access_key": "a", "secret_key": "s", "endpoint_url": endpoint}
    return CloudCredentials.from_metadata({"aws": {"latest": keys}})


@pytest.mark.parametrize(
    "endpoint",
    ["http://user@store:9000", "http://store:9000\\@169.254.169.254", "http://2852039166", "http://0xa9.0xfe.0xa9.0xfe",
     "http://0251.0376.0251.0376", "http://169.254.43518", "file:///etc", "http://[fe80::1%25eth0]", "http://a?x=y",
     "gopher://store", "http://store:99999", "http://"],
)  # fmt: skip
def test_an_endpoint_that_can_be_read_in_two_ways_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidArgument, match="endpoint_url"):
        credentials(endpoint)


METADATA = ("169.254.169.254", "169.254.170.2", "168.63.129.16", "100.100.100.200", "fd00:ec2::254", "fe80::1")


@pytest.mark.parametrize("address", METADATA)
@pytest.mark.parametrize("by_name", [False, True])
def test_no_store_is_where_a_cloud_keeps_a_machines_credentials(
    address: str, by_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a user writes the address or a name of theirs that has it."""
    if by_name:
        resolver = Rebinding(monkeypatch, address, address)
        shown = "store.example"
    else:
        resolver = None
        shown = f"[{address}]" if ":" in address else address
    place = ObjectLocation("aws", "latest", "meta-data/iam")
    with pytest.raises(InvalidArgument, match="endpoint_url"):
        ObjectSource(place, credentials(f"http://{shown}"), ObjectLimits()).read_listing()
    assert resolver is None or resolver.connected == []


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with job_api(None, tmp_path_factory.mktemp("stores")) as api:
        yield api


def test_a_workspace_with_such_a_store_is_not_made(gateway: Api) -> None:
    details = {"access_key": "a", "secret_key": "s", "cloud_bucket_name": "latest"}
    for version in ("v1", "v2"):
        for address in ("169.254.169.254", "2852039166", "[fd00:ec2::254]"):
            body = {
                "name": "w",
                "cloud_type": "aws",
                "cloud_specific_details": details | {"endpoint_url": f"http://{address}"},
            }
            got = gateway.ask("POST", f"/api/{version}/orgs/{ORG}/workspaces", body, gateway.login("alice"))
            assert got.status == 400, got.body
            assert "endpoint_url" in got.json["error_desc"]
    assert gateway.ask("GET", f"/api/v1/orgs/{ORG}/workspaces", token=gateway.login("alice")).json["workspaces"] == []
