# SPDX-License-Identifier: Apache-2.0
"""The console of a machine's fleet without a browser: where it listens, who gets in, and what it says."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet_process import FleetUp, fleet_up
from local_site import runtime, service
from routes_and_rights import FLEET_CONSOLE, by_route

from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.net.sockets import Address
from headrace.programs.console.fleet import KEY_FILE, ConsoleListener, failures_text, load_key, parse_loopback
from support.ports import free_port
from support.programs import Program
from support.waiting import eventually

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetUp]:
    with fleet_up(tmp_path_factory.mktemp("fleet_http"), free_port()) as made:
        made.apply(made.model, runtime(), service("first"))
        made.ready("first")
        yield made


def ask(site: FleetUp, method: str, path: str, body: Any = None, **fields: str) -> tuple[int, Any, dict[str, str]]:
    """By who has the key, unless fields say otherwise."""
    connection = http.client.HTTPConnection(site.url.removeprefix("http://"), timeout=60)
    sent = {"authorization": f"Bearer {site.key}", **fields}
    connection.request(method, path, None if body is None else json.dumps(body), sent)
    answer = connection.getresponse()
    read, told = answer.read(), {name.lower(): value for name, value in answer.getheaders()}
    connection.close()
    return answer.status, json.loads(read) if told.get("content-type") == "application/json" else read, told


def path_of(route: str) -> str:
    return route.split(" ")[1].replace("{}", "default", 1).replace("{}", "first", 1)


def test_how_routers_met_failures_is_a_sentence(site: FleetUp) -> None:
    backend = {"ejected_times": 2, "failed_checks": 3, "slow_start": 1.0}
    status = {"backends": [backend, {**backend, "slow_start": 0.4}], "retries": {"spent": 5, "refused": 1}}
    assert failures_text([status]) == (
        "4 ejections, 6 failed checks, 5 retries (1 beyond the budget), 1 of 2 replicas in slow start"
    )
    hedging = {**status, "hedges": {"asked": 7, "won": 2, "refused": 0}}
    assert "10 retries" in failures_text([status, hedging])
    assert "7 hedged requests (2 answered first)" in failures_text([status, hedging])
    assert failures_text([]) == ""
    _, told, _ = ask(site, "GET", "/console/api/services/default/first")
    assert (
        told["failures"]
        == "0 ejections, 0 failed checks, 0 retries (0 beyond the budget), 0 of 1 replicas in slow start"
    )


@pytest.mark.parametrize("sent", ["", "Bearer", "Bearer wrong", "Basic eDp4", "Bearer {key}x"])
def test_only_the_page_is_served_without_the_key(site: FleetUp, sent: str) -> None:
    for route, right in by_route(FLEET_CONSOLE).items():
        method = route.split(" ")[0]
        status, _, _ = ask(site, method, path_of(route), {}, authorization=sent.format(key=site.key))
        assert (status == 401) is (right == "key"), (route, status)
    assert site.get("first")


def test_a_page_of_others_is_not_answered_so_that_it_can_read_or_send(site: FleetUp) -> None:
    path = "/console/api/services/default/first"
    body = {"origin": "https://elsewhere.example", "access-control-request-method": "DELETE"}
    status, _, fields = ask(site, "OPTIONS", path, **body, authorization="")
    assert status >= 400 and "access-control-allow-origin" not in fields
    status, _, fields = ask(site, "GET", "/console/api/services", origin="https://elsewhere.example")
    assert "access-control-allow-origin" not in fields
    assert ask(site, "GET", f"{path}?key={site.key}", authorization="", cookie=f"key={site.key}")[0] == 401
    _, _, page = ask(site, "GET", "/console", authorization="")
    assert "frame-ancestors 'none'" in page["content-security-policy"] and page["x-frame-options"] == "DENY"


def test_its_data_and_its_actions(site: FleetUp) -> None:
    one = "/console/api/services/default/first"
    status, told, fields = ask(site, "GET", "/console/api/services")
    assert (status, fields["cache-control"]) == (200, "no-store")
    (row,) = told["services"]
    assert (row["name"], row["verdict"], row["ready_replicas"], row["shares"]) == ("first", "ready", 1, [])
    detail = ask(site, "GET", one)[1]
    assert [pod["state"] for pod in detail["pods"]] == ["Loaded"]
    (metrics,) = [pod["metrics"] for pod in detail["pods"]]
    assert metrics["memory_bytes"] > 1e6 and metrics["requests"] == metrics["errors"] == metrics["outstanding"] == 0
    assert any(rollout["message"].startswith("engine: revision") for rollout in detail["rollouts"])
    # It has bounds and no resource request, so that it is not scaled by its load.
    assert [scaler["reason"] for scaler in detail["scaling"]] == ["NoResourceRequest"]
    assert {"Ready", "EngineReady"} <= {condition["type"] for condition in detail["conditions"]}
    assert [event["time"] for event in detail["events"]] == sorted((e["time"] for e in detail["events"]), reverse=True)
    assert "first begins" in ask(site, "GET", f"{one}/logs?tail=5")[1]["logs"][0]["text"]
    assert ask(site, "GET", f"{one}/logs?tail=x&pod=none")[0] == 404
    assert ask(site, "GET", "/console/api/services/default/none")[0] == 404
    assert ask(site, "POST", f"{one}/scale", {"component": "engine", "replicas": "two"})[0] == 400
    assert ask(site, "POST", f"{one}/scale", [1])[0] == 400
    assert ask(site, "POST", f"{one}/scale", {"component": "engine", "replicas": 2})[1]["replicas"] == 2
    eventually(lambda: len(site.pods("first")) == 2)
    (scaled,) = [scaler for scaler in ask(site, "GET", one)[1]["scaling"] if scaler["reason"] == "Scaled"]
    assert scaled["message"] == "engine: 1 -> 2 replicas: requested by a user"
    generation = ask(site, "GET", one)[1]["generation"]
    assert ask(site, "POST", f"{one}/rollout", {"deed": "promote", "generation": generation - 1})[0] == 409
    status, told, _ = ask(site, "POST", f"{one}/rollout", {"deed": "promote", "generation": generation})
    assert status == 409 and "has no canary" in told["error"]
    assert ask(site, "POST", f"{one}/rollout", {"deed": "other", "generation": generation})[0] == 400


def test_the_key_is_its_owners_and_stays(site: FleetUp, tmp_path: Path) -> None:
    file = site.root / KEY_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert load_key(site.root) == site.key and len(site.key) >= 40
    (tmp_path / KEY_FILE).write_text('{"key": "short"}')
    created = load_key(tmp_path)
    assert created != "short" and load_key(tmp_path) == created


@pytest.mark.parametrize("address", ["0.0.0.0:8079", "192.168.1.2:80", "example.com:80", "unix:/tmp/x"])
def test_it_is_served_to_this_machine_alone(address: str) -> None:
    with pytest.raises(InvalidArgument, match="127.0.0.1:PORT"):
        parse_loopback(address)
    assert parse_loopback("[::1]:0").host == "::1" and parse_loopback("localhost:1").port == 1


def test_a_taken_port_is_reported_or_avoided(tmp_path: Path) -> None:
    control: Any = None

    async def tried(taken: Address) -> str:
        with pytest.raises(FailedPrecondition, match="in use"):
            await ConsoleListener(taken, fixed=True).open(control, tmp_path)
        door = ConsoleListener(taken, fixed=False)
        server = await door.open(control, tmp_path)
        await server.drain(0.0)
        return door.url

    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = asyncio.run(tried(Address("127.0.0.1", taken.getsockname()[1])))
        port = re.fullmatch(rf"http://127\.0\.0\.1:(\d+)/console#key={load_key(tmp_path)}", url)
        assert port and int(port[1]) != taken.getsockname()[1]


def address_printed_by_up(folder: Path, *words: str) -> str:
    """What `headrace up` prints until it is ready."""
    log = folder.with_suffix(".log")
    program = Program("up", "--state-dir", folder, "--port", str(free_port()), *words, log=log).start()
    eventually(lambda: "local fleet running" in program.log or program.process.poll() is not None)
    program.stop()
    return program.log


@pytest.mark.slow
def test_headrace_up_prints_the_address_of_its_console(site: FleetUp, tmp_path: Path) -> None:
    assert "in use" in address_printed_by_up(tmp_path / "one", "--console", site.url.removeprefix("http://"))
    assert "#key=" not in address_printed_by_up(tmp_path / "two", "--no-console")
    assert re.search(r"http://127\.0\.0\.1:\d+/console#key=", address_printed_by_up(tmp_path / "three"))
