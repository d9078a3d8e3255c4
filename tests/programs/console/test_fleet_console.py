# SPDX-License-Identifier: Apache-2.0
"""The console of a machine's fleet in a real Chromium: services, replicas, traffic, events, logs, and orders."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from console_tab import BRIGHTNESS, Tab
from fleet_process import FleetUp, fleet_up
from local_site import runtime, service

from headrace.platforms.kubernetes_client.objects import get_int
from support.ports import free_port
from support.waiting import eventually

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetUp]:
    with fleet_up(tmp_path_factory.mktemp("fleet_console"), free_port()) as made:
        made.apply(made.model, runtime(), runtime("crashing", args=["--text=crash"]))
        made.apply(service("rivers"), service("stones", "crashing"), service("birds", minReplicas=2))
        made.ready("birds", 2)
        made.ready("rivers")
        yield made


@pytest.fixture
def tab(browser: Any, site: FleetUp) -> Iterator[Tab]:
    created = entered(browser, site)
    yield created
    created.close()


def entered(browser: Any, site: FleetUp, **options: Any) -> Tab:
    """A tab at the address that `headrace up` printed."""
    tab = Tab(browser, site.url, **options)
    tab.open(f"#key={site.key}")
    tab.page.wait_for_selector("tbody tr")
    return tab


def canary(site: FleetUp, text: str, percent: int) -> None:
    """Another revision, which gets a share of the requests."""
    newer = {"name": "ome-container", "args": ["--port=8080", f"--text={text}"]}
    site.apply(service("birds", minReplicas=2, runner=newer, canaryTrafficPercent=percent))


def share(site: FleetUp) -> int | None:
    return get_int(site.get("birds"), "spec", "engine", "canaryTrafficPercent")


def test_services_are_shown_with_their_reasons_and_found(tab: Tab, site: FleetUp) -> None:
    page = tab.page
    row = page.locator("tbody tr", has=page.get_by_role("rowheader", name="stones"))
    row.get_by_text("failing").wait_for()
    row.get_by_text("this one crashes at its start").wait_for()
    page.get_by_text(re.compile("[0-9] of [0-9] ready")).wait_for()
    page.get_by_text("3 services", exact=True).wait_for()
    assert page.get_by_role("link", name="http://127.0.0.1").count() >= 2
    page.get_by_label("Search").fill("rivers ready")
    page.get_by_text("1 service", exact=True).wait_for()
    page.get_by_label("Search").fill("rivers failing")
    page.get_by_text("No services.").wait_for()


def test_the_key_is_removed_from_the_address_and_sent_in_a_header(browser: Any, site: FleetUp) -> None:
    tab = Tab(browser, site.url)
    sent: list[str] = []
    tab.page.on("request", lambda request: sent.append(request.headers.get("authorization", "")))
    page = tab.open()
    page.get_by_role("dialog").get_by_text("headrace up").wait_for()
    page.get_by_role("textbox", name="API key").fill("wrong")
    page.keyboard.press("Enter")
    page.get_by_role("dialog").get_by_text("headrace up").wait_for()
    page.get_by_role("textbox", name="API key").fill(site.key)
    page.keyboard.press("Enter")
    page.wait_for_selector("tbody tr")
    tab.expect(401)
    page.goto("about:blank")
    tab.open(f"#key={site.key}").wait_for_selector("tbody tr")
    assert site.key not in page.url and page.evaluate("history.length") <= 4
    assert f"Bearer {site.key}" in sent
    assert not [url for url in tab.asked if site.key in url.partition("#")[0]]
    tab.asked = [url for url in tab.asked if url != "about:blank"]
    tab.close()


def test_a_service_with_its_replicas_logs_and_events(tab: Tab, site: FleetUp) -> None:
    page = tab.page
    page.get_by_role("link", name="stones").click()
    page.get_by_text("FailedToLoad").first.wait_for()
    page.get_by_role("region", name="Table of conditions").get_by_role("rowheader", name="EngineReady").wait_for()
    page.get_by_role("region", name="Table of events").get_by_text("ome-container ended with 1").first.wait_for()
    page.get_by_label("Before the last restart").check()
    page.get_by_role("region", name="Log lines").get_by_text("this one crashes").wait_for()
    page.get_by_role("navigation").get_by_role("link", name="Services").click()
    page.get_by_role("link", name="birds").click()
    page.get_by_role("button", name=re.compile("^Log of birds-engine")).first.click()
    log = page.get_by_role("region", name="Log lines")
    page.wait_for_function("() => !document.querySelector('pre.log').textContent.includes('==>')")
    log.get_by_text(re.compile("birds begins on")).wait_for()
    page.get_by_role("link", name="Events").click()
    page.get_by_role("cell", name="birds is ready").wait_for()


def test_it_is_scaled_after_a_question(tab: Tab, site: FleetUp) -> None:
    page = tab.open("#/services/default/rivers")
    page.get_by_role("button", name="Scale engine").click()
    page.get_by_role("spinbutton", name="Replicas").fill("2")
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert len(site.pods("rivers")) == 1
    page.get_by_role("button", name="Scale engine").click()
    page.get_by_role("spinbutton", name="Replicas").fill("2")
    page.get_by_role("dialog").get_by_role("button", name="Scale").click()
    page.get_by_text("rivers is scaled to 2.").wait_for()
    page.get_by_role("cell", name="2 of 2").wait_for()
    assert len(site.pods("rivers")) == 2
    why = page.get_by_role("region", name="Table of scaling decisions")
    why.get_by_text("engine: 1 -> 2 replicas: requested by a user").wait_for()
    memory = page.get_by_role("region", name="Table of replicas").get_by_role("cell", name=re.compile("MiB"))
    memory.first.wait_for()


def test_a_canary_is_promoted_and_another_rolled_back(tab: Tab, site: FleetUp) -> None:
    canary(site, "sparrows", 25)
    page = tab.page
    page.get_by_role("img", name=re.compile("Requests: .*25 % newest")).wait_for()
    tab.picture("fleet")
    page = tab.open("#/services/default/birds")
    page.get_by_text("canary at 25% of 25%").first.wait_for()
    page.get_by_role("rowheader", name=re.compile("canary")).wait_for()
    tab.picture("fleet-service")
    assert not tab.findings()
    page.get_by_role("button", name="Promote").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert share(site) == 25
    page.get_by_role("button", name="Promote").click()
    page.get_by_role("dialog").get_by_role("button", name="Promote").click()
    page.get_by_text("birds: promoted.").wait_for()
    history = page.get_by_role("region", name="Table of rollouts")
    history.get_by_text(re.compile("engine: requests go to .*25 %")).wait_for()
    history.get_by_text(re.compile("engine: revision .* created after")).first.wait_for()
    assert share(site) == 100
    page.get_by_role("button", name="Promote").wait_for(state="hidden")
    site.ready("birds", 2)
    canary(site, "swallows", 50)
    page.get_by_text("canary at 50% of 50%").first.wait_for()
    page.get_by_role("button", name="Undo").click()
    page.get_by_role("dialog").get_by_role("button", name="Undo").click()
    page.get_by_text("birds: undone.").wait_for()
    assert share(site) == 0


def test_the_keyboard_is_enough_to_delete(browser: Any, site: FleetUp) -> None:
    site.apply(service("fleeting"))
    tab = entered(browser, site)
    page = tab.page
    page.get_by_role("link", name="fleeting").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("fleeting")
    page.get_by_text("1 service", exact=True).wait_for()
    tab.tab_to("fleeting")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="fleeting").wait_for()
    page.wait_for_selector("tbody tr")
    tab.tab_to("Delete")
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    assert tab.focused() == "Delete" and site.get("fleeting")
    page.keyboard.press("Enter")
    page.get_by_role("dialog").get_by_role("button", name="Delete").focus()
    page.keyboard.press("Enter")
    page.get_by_text("fleeting is being deleted.").wait_for()
    eventually(lambda: not site.pids("fleeting"))
    tab.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_passes_the_accessibility_check(browser: Any, site: FleetUp, scheme: str) -> None:
    tab = entered(browser, site, color_scheme=scheme)
    assert (tab.page.evaluate(BRIGHTNESS) > 128) is (scheme == "light")
    for size in ({"width": 1280, "height": 860}, {"width": 390, "height": 844}):
        tab.page.set_viewport_size(size)
        for place in ("#/services", "#/events", "#/services/default/stones"):
            page = tab.open(place)
            page.wait_for_selector("tbody tr")
            assert not tab.findings(), (place, size)
            wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, (place, size)
    tab.close()
