# SPDX-License-Identifier: Apache-2.0
"""The gateway's console in a real Chromium: who comes in, what they see, and what their role gives them to press."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from console_tab import BRIGHTNESS, Tab
from gateway_with_users import ORG, GatewayWithUsers, log_in

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]
PLACES = ["#/services", "#/jobs", "#/experiments", "#/audit"]


@pytest.fixture
def tab(browser: Any, gateway: GatewayWithUsers) -> Iterator[Tab]:
    created = gateway.tab(browser, "alice")
    yield created
    created.close()


@pytest.fixture(scope="module")
def service(gateway: GatewayWithUsers) -> Iterator[str]:
    """A service that is ready."""
    job = gateway.start()
    gateway.running.until_loaded(f"/api/v2/orgs/{ORG}/inference_microservices/{job}:status", gateway.token)
    yield job
    gateway.ask("POST", f"inference_microservices/{job}:stop")


def test_a_wrong_key_is_refused_and_a_right_one_accepted(browser: Any, gateway: GatewayWithUsers) -> None:
    tab = Tab(browser, gateway.url)
    sent: list[tuple[str, str]] = []
    tab.page.on("request", lambda asked: sent.append((asked.url, asked.headers.get("authorization", ""))))
    page = tab.open("#/jobs")
    page.get_by_role("heading", name="Log in").wait_for()
    assert not page.get_by_role("link", name="Jobs").is_visible()
    log_in(page, "nvapi-" + "x" * 64)
    page.get_by_role("alert").get_by_text("Unauthorized").wait_for()
    tab.expect(401)
    log_in(page, gateway.keys["alice"], "elsewhere")
    page.get_by_role("alert").get_by_text("no role in organisation 'elsewhere'").wait_for()
    tab.expect(401)
    log_in(page, gateway.keys["alice"])
    page.get_by_text(f"alice, operator of {ORG}").wait_for()
    page.get_by_role("heading", name="Jobs").wait_for()
    page.get_by_role("link", name="colours", exact=True).wait_for()
    key = gateway.keys["alice"]
    kept: str = page.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])")
    token = page.evaluate("sessionStorage.getItem('headrace-key')")
    assert token.startswith("eyJ") and key not in kept
    assert not [address for address, _ in sent if key in address or token in address]
    assert f"Bearer {token}" in {field for _, field in sent} and f"Bearer {key}" not in {field for _, field in sent}
    page.reload()
    page.get_by_role("link", name="colours", exact=True).wait_for()
    page.get_by_role("button", name="Log out").click()
    page.get_by_role("heading", name="Log in").wait_for()
    assert token not in page.evaluate("JSON.stringify({...sessionStorage})")
    # A user's programs have the same token, and go on.
    assert gateway.running.ask("GET", f"/api/v2/orgs/{ORG}/jobs", token=token).status == 200
    tab.close()


def test_an_expired_token_requires_a_new_login(browser: Any, gateway: GatewayWithUsers) -> None:
    tab = gateway.tab(browser, "victor", "#/services")
    tab.page.get_by_role("heading", name="Services").wait_for()
    gateway.command("users", "revoke-tokens", "victor")
    tab.page.get_by_role("heading", name="Log in").wait_for()
    tab.page.get_by_text("You are logged out").wait_for()
    tab.expect(401)
    tab.close()


def test_jobs_are_searched_and_turned_page_by_page(tab: Tab, gateway: GatewayWithUsers) -> None:
    for number in range(30):
        gateway.register(gateway.folder / "model", f"many-{number}")
    page = tab.open("#/jobs")
    page.get_by_label("Kind").select_option("trained model")
    total = gateway.ask("GET", "jobs?action=train&size=1").json["pagination_info"]["total_records"]
    page.get_by_text(f"1 to 25 of {total}").wait_for()
    page.locator("tbody tr").nth(24).wait_for()
    assert page.locator("tbody tr").count() == 25
    assert page.get_by_role("button", name="Newer").is_disabled()
    page.get_by_role("button", name="Older").click()
    page.get_by_text(f"26 to {total} of {total}").wait_for()
    page.get_by_role("link", name="colours", exact=True).wait_for()
    page.get_by_label("Search").fill("many-2")
    page.get_by_text("1 to 11 of 11").wait_for()
    page.get_by_label("Status", exact=True).select_option("error")
    page.get_by_text("No job matches.").wait_for()


def test_experiments_and_their_jobs(tab: Tab, gateway: GatewayWithUsers) -> None:
    page = tab.open("#/experiments")
    page.get_by_label("Search").fill(gateway.experiment)
    page.get_by_text("1 to 1 of 1").wait_for()
    page.locator("tbody a").click()
    page.get_by_role("link", name="colours", exact=True).wait_for()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert (
        gateway.running.ask("GET", f"/api/v1/orgs/{ORG}/experiments/{gateway.experiment}", token=gateway.token).status
        == 200
    )


def test_a_viewer_has_nothing_to_press(browser: Any, gateway: GatewayWithUsers, service: str) -> None:
    tab = gateway.tab(browser, "victor", f"#/jobs/{service}")
    page = tab.page
    page.get_by_label("States").get_by_text("Ready").wait_for()
    page.get_by_text("The model is ready").wait_for()
    words = ("Stop", "Delete", "Cancel", "Send")
    assert not [word for word in words if page.get_by_role("button", name=word, exact=True).count()]
    page = tab.open("#/jobs")
    page.get_by_role("link", name="colours", exact=True).or_(page.get_by_role("link", name="many-29")).first.wait_for()
    assert not page.get_by_role("link", name="Start a service").count()
    assert not page.get_by_role("button", name="Stop").count()
    assert not page.get_by_role("link", name="Audit log").is_visible()
    tab.open(f"#/start/{gateway.parent}").get_by_text("Only an operator or an admin").wait_for()
    assert page.get_by_role("button", name="Start").is_disabled()
    tab.open("#/audit").get_by_text("the role viewer does not allow").wait_for()
    tab.expect(403)
    tab.close()


def test_an_admin_reads_who_did_what(browser: Any, gateway: GatewayWithUsers, service: str) -> None:
    tab = gateway.tab(browser, "admin")
    page = tab.page
    page.get_by_role("link", name="Audit log").click()
    page.get_by_label("Search").fill(f"services.start {service}")
    page.get_by_role("cell", name="alice").first.wait_for()
    page.get_by_text("1 to 1 of 1, in the newest").wait_for()
    page.get_by_label("Search").fill("")
    page.get_by_role("cell", name="login").first.wait_for()
    assert "nvapi-" not in page.content()
    tab.close()


def test_light_and_dark(browser: Any, gateway: GatewayWithUsers, service: str) -> None:
    for scheme, bright in (("light", True), ("dark", False)):
        tab = gateway.tab(browser, "alice", color_scheme=scheme)
        assert (tab.page.evaluate(BRIGHTNESS) > 128) is bright
        tab.page.get_by_role("button", name="Theme").click()
        assert tab.page.evaluate(BRIGHTNESS) > 128
        tab.page.get_by_role("button", name="Theme").click()
        assert tab.page.evaluate(BRIGHTNESS) < 128
        tab.page.reload()
        tab.page.wait_for_selector("tbody tr")
        assert tab.page.evaluate(BRIGHTNESS) < 128
        tab.close()


def test_the_keyboard_is_enough(browser: Any, gateway: GatewayWithUsers, service: str) -> None:
    tab = Tab(browser, gateway.url)
    page = tab.open("#/services")
    page.get_by_role("heading", name="Log in").wait_for()
    page.keyboard.type(ORG)
    page.keyboard.press("Tab")
    page.keyboard.type(gateway.keys["alice"])
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Services").wait_for()
    page.wait_for_selector("tbody tr")
    page.keyboard.press("/")
    page.keyboard.type(service)
    page.get_by_text("1 to 1 of 1").wait_for()
    name = f"colours {service[:8]}"
    tab.tab_to(f"Stop {name}")
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    assert tab.focused() == f"Stop {name}"
    assert gateway.status(service) == "Running"
    page.keyboard.press("Shift+Tab")
    assert tab.focused() == name
    page.keyboard.press("Enter")
    page.get_by_role("heading", name=name).wait_for()
    page.get_by_label("States").get_by_text("Ready").wait_for()
    tab.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_passes_the_accessibility_check(
    browser: Any, gateway: GatewayWithUsers, service: str, scheme: str
) -> None:
    out = Tab(browser, gateway.url, color_scheme=scheme)
    out.open()
    out.page.get_by_role("heading", name="Log in").wait_for()
    assert not out.findings()
    out.close()
    tab = gateway.tab(browser, "admin", color_scheme=scheme)
    for size in ({"width": 1280, "height": 860}, {"width": 390, "height": 844}):
        tab.page.set_viewport_size(size)
        for place in (*PLACES, f"#/start/{gateway.parent}", f"#/experiments/{gateway.experiment}", f"#/jobs/{service}"):
            page = tab.open(place)
            page.wait_for_selector("h1")
            page.wait_for_load_state("networkidle") if "start" in place else page.wait_for_selector("tbody tr")
            assert not tab.findings(), (place, size)
            wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, (place, size)
    tab.close()
