# SPDX-License-Identifier: Apache-2.0
"""Jobs in the gateway's console, in a real Chromium: a service from its start to its end, and batches."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from console_tab import Tab
from gateway_with_users import GatewayWithUsers

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]
WATCH = """() => {
    const seen = [];
    const look = () => {
        const now = document.querySelector(".steps [aria-current]")?.textContent;
        if (now && now !== seen[seen.length - 1]) seen.push(now);
    };
    new MutationObserver(look).observe(document.querySelector("main"), { childList: true, subtree: true });
    look();
    return seen;
}"""
"""Keeps every state that the page shows from now on."""


@pytest.fixture
def tab(browser: Any, gateway: GatewayWithUsers) -> Iterator[Tab]:
    created = gateway.tab(browser, "alice")
    yield created
    created.close()


def red() -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (160, 120), (200, 90, 30)).save(buffer, "PNG")
    return buffer.getvalue()


def agree(page: Any, word: str) -> None:
    """Press a button, refuse when asked, press it again, and agree."""
    page.get_by_role("button", name=word, exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel", exact=True).first.click()
    page.get_by_role("dialog").wait_for(state="detached")
    page.get_by_role("button", name=word, exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name=word, exact=True).last.click()


def test_a_service_is_started_watched_queried_and_stopped(tab: Tab, gateway: GatewayWithUsers) -> None:
    page = tab.open("#/jobs")
    page.get_by_label("Search").fill(gateway.parent)
    page.get_by_role("link", name="Start a service of colours", exact=True).click()
    page.get_by_label("Idle minutes").fill("45")
    page.get_by_label("Variables").fill("PATH=/elsewhere")
    page.get_by_role("button", name="Start").click()
    page.get_by_text("'PATH' is not an allowed variable").wait_for()
    tab.expect(400)
    page.get_by_label("Variables").fill("TAO_LOG_LEVEL=INFO")
    seen = page.evaluate_handle(WATCH)
    page.get_by_role("button", name="Start").click()
    page.get_by_role("heading", name="Request").wait_for()
    states = page.evaluate("(seen) => seen", seen)
    assert states[-1] == "Ready" and "Initializing" in states, states
    page.get_by_label("State", exact=True).get_by_text("Running", exact=True).wait_for()
    page.get_by_text("0 of 45 minutes").wait_for()
    job = page.url.rpartition("/")[2]
    page.get_by_role("region", name="Log lines").get_by_text("The model is ready").wait_for()
    page.get_by_role("cell", name="launched by process").wait_for()

    picture = {"name": "red.png", "mimeType": "image/png", "buffer": red()}
    page.get_by_label("Images or videos").set_input_files(picture)
    page.get_by_label("top_k").fill("2")
    page.get_by_role("button", name="Send").click()
    page.locator(".result .said").get_by_text("red", exact=True).wait_for()
    page.get_by_text("Full answer").click()
    answer = page.get_by_role("region", name="Answer").inner_text()
    assert '"completed"' in answer and '"green"' in answer and '"blue"' not in answer
    page.get_by_text("Full answer").click()
    tab.picture("gateway-service")
    page.get_by_label("Images or videos").set_input_files({**picture, "buffer": b"this is no picture"})
    page.get_by_role("button", name="Send").click()
    page.locator(".result .error").wait_for()
    tab.expect(400)

    agree(page, "Stop")
    page.get_by_text("is stopped.").wait_for()
    tab.expect(404, late=True)  # a look at how it is may have come right then
    page.get_by_text("stopped by a user").first.wait_for()
    assert gateway.status(job) == "Done" and not page.get_by_role("heading", name="Request").is_visible()
    agree(page, "Delete")
    page.get_by_role("heading", name="Services").wait_for()
    assert gateway.ask("GET", f"jobs/{job}").status == 404


def test_a_model_that_cannot_be_loaded_states_the_reason(tab: Tab, gateway: GatewayWithUsers) -> None:
    broken = gateway.folder / "broken.onnx"
    broken.write_bytes(b"this is no model")
    _, parent = gateway.register(broken, "broken")
    page = tab.open(f"#/start/{parent}")
    page.locator("button:enabled", has_text="Start").click()
    page.locator(".steps .bad").wait_for()
    page.locator(".card .error").wait_for()
    tab.expect(404, late=True)
    page.get_by_text("error", exact=True).first.wait_for()
    assert not page.get_by_role("heading", name="Request").is_visible()


def test_a_batch_waits_continues_and_is_retried(tab: Tab, gateway: GatewayWithUsers) -> None:
    job = gateway.begin("many", 20_000)
    page = tab.open(f"#/jobs/{job}")
    page.get_by_role("heading", name="many").wait_for()
    agree(page, "Pause")
    page.get_by_role("button", name="Resume", exact=True).wait_for()
    assert gateway.status(job) == "Paused"
    agree(page, "Resume")
    page.get_by_role("button", name="Pause", exact=True).wait_for()
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel", exact=True).last.click()
    page.get_by_role("button", name="Retry", exact=True).wait_for()
    assert gateway.status(job) == "Canceled"
    agree(page, "Retry")
    page.get_by_role("button", name="Pause", exact=True).wait_for()
    again = page.url.rpartition("/")[2]
    assert again != job and gateway.ask("POST", f"jobs/{again}:cancel").status == 200


def test_the_list_follows_and_stops(tab: Tab, gateway: GatewayWithUsers) -> None:
    page = tab.open("#/services")
    other, job = gateway.start(), gateway.start()
    row = page.locator("tbody tr", has_text=job)
    row.get_by_text("running", exact=True).wait_for()
    tab.picture("gateway-services")
    row.get_by_role("button", name="Stop").click()
    page.get_by_role("dialog").get_by_role("button", name="Stop").click()
    row.get_by_text("done", exact=True).wait_for()
    assert gateway.status(job) == "Done" and not row.get_by_role("button", name="Stop").count()
    assert gateway.ask("POST", f"inference_microservices/{other}:stop").status == 200
