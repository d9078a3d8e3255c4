# SPDX-License-Identifier: Apache-2.0
"""The page of requests, the playground's timelines and the bars of loads, in a real Chromium against a real server."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from console_models import write_identity
from console_process import INFER, ask, console_server
from console_tab import Tab
from test_console_browser import row

from headrace.api.access.api_keys import create_key

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]

_SLOW = """
import time
from pathlib import Path


class TritonPythonModel:
    def initialize(self, args):
        while not Path({go!r}).exists():
            time.sleep(0.02)

    def execute(self, requests):
        return []
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`echo`; `together`, which waits for three requests; `slow`, which starts when there is a file `go`."""
    folder = tmp_path_factory.mktemp("requests_models")
    for name in ("echo", "together", "slow"):
        write_identity(folder, name)
    config = folder / "together" / "config.pbtxt"
    delay = "dynamic_batching { preferred_batch_size: [ 3 ] max_queue_delay_microseconds: 30000000 }"
    config.write_text(config.read_text().replace("dynamic_batching { }", delay))
    config = folder / "slow" / "config.pbtxt"
    config.write_text(config.read_text().replace('"identity"', '"python"'))
    (folder / "slow" / "1" / "model.py").write_text(_SLOW.format(go=str(folder / "go")))
    return folder


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    wanted = ("--model-control-mode", "explicit", "--load-model", "echo", "--load-model", "together")
    with console_server(tmp_path_factory.mktemp("requests_log") / "log", models, *wanted) as url:
        yield url


@pytest.fixture
def tab(browser: Any, server: str) -> Iterator[Tab]:
    tab = Tab(browser, server)
    yield tab
    tab.close()


def test_requests_are_watched_listed_and_opened(tab: Tab, server: str) -> None:
    page = tab.open("#/requests/together")
    page.get_by_text("No timeline yet").wait_for()
    page.get_by_label("Requests (at most").fill("3")
    page.get_by_role("button", name="Record").click()
    page.get_by_text("Recording together: 3 more").wait_for()
    url = f"{server}/v2/models/together/infer"
    asking = [threading.Thread(target=ask, args=(url, {"id": f"r{number}", **INFER})) for number in range(3)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    # The requests themselves are listed without asking.
    listed = page.get_by_role("region", name="Table of requests")
    for number in range(3):
        listed.get_by_role("cell", name=f"r{number}", exact=True).wait_for()
    page.get_by_role("region", name="Table of timelines").locator("tbody tr").nth(2).wait_for()
    page.wait_for_function(
        "() => [...document.querySelectorAll('tbody tr')].every((row) => row.textContent.includes('ok'))"
    )
    page.get_by_role("button", name="Open request 2").click()
    page.get_by_text("Batch of 3 requests with 3 rows").wait_for()
    reported = page.get_by_role("region", name="Timeline", exact=True).inner_text()
    assert "it had a preferred size" in reported and "no request stayed in the queue" in reported
    others = {"r0", "r1", "r2"} - set(re.findall(r"together: (r\d)", reported))
    assert len(others) == 2 and all(f"({name}) with 1 row" in reported for name in others)
    phases = page.get_by_role("region", name="Timeline", exact=True).get_by_role("rowheader").all_inner_texts()
    assert phases[0] == "decoded" and phases[1] == "queued" and phases[-1] == "encoded and sent"
    assert tab.findings() == []
    tab.picture("requests")


def test_failed_requests_are_listed_and_filtered(tab: Tab, server: str) -> None:
    assert ask(f"{server}/v2/models/echo/infer", {"id": "fine", **INFER}).status == 200
    wrong = {"id": "mistaken", "inputs": [{**INFER["inputs"][0], "shape": [2, 2]}]}
    assert ask(f"{server}/v2/models/echo/infer", wrong).status == 400
    page = tab.open("#/requests")
    table = page.get_by_role("region", name="Table of requests")
    failed = table.locator("tbody tr", has_text="mistaken")
    failed.get_by_text("invalid argument").wait_for()
    assert "unexpected shape" in failed.inner_text()
    table.get_by_role("cell", name="fine", exact=True).wait_for()
    page.get_by_role("button", name="Failed", exact=True).click()
    table.get_by_role("cell", name="fine", exact=True).wait_for(state="detached")
    failed.wait_for()
    page.get_by_label("Model", exact=True).select_option("together")
    page.get_by_text("No request has failed.").wait_for()


def test_a_watch_is_stopped(tab: Tab, server: str) -> None:
    page = tab.open("#/requests/echo")
    page.get_by_role("button", name="Record").click()
    page.get_by_text("Recording echo: 20 more").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.wait_for_function("() => !document.body.textContent.includes('Recording echo')")
    assert ask(f"{server}/console/api/requests").json["watching"] == {}


def test_the_playground_shows_the_timeline_of_what_it_sent(tab: Tab) -> None:
    page = tab.open("#/playground/echo")
    page.get_by_role("button", name="Send").click()
    page.wait_for_selector("text=echo version 1 answered")
    page.get_by_text("formed because an instance was idle").wait_for()
    page.get_by_role("rowheader", name="computed").wait_for()
    assert tab.findings() == []


def test_without_the_scope_there_is_an_answer_and_no_timeline(
    browser: Any,
    models: Path,
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys.yaml"
    key = create_key(keys, "guest", ["read", "infer"], created=0)
    wanted = ("--model-control-mode", "explicit", "--load-model", "echo")
    with console_server(tmp_path / "log", models, *wanted, "--api-keys-file", keys) as url:
        tab = Tab(browser, url)
        tab.page.goto(f"{url}/console#/playground/echo")
        tab.page.get_by_label("API key").last.fill(key)
        tab.page.keyboard.press("Enter")
        tab.page.get_by_role("button", name="Send").click()
        tab.page.wait_for_selector("text=echo version 1 answered")
        tab.page.wait_for_selector("text=A timeline needs a key with the scope admin.")
        # A browser tells of each answer that is a refusal; those were meant.
        tab.complaints = [text for text in tab.complaints if "401" not in text and "403" not in text]
        tab.close()


def test_a_load_has_a_bar_until_it_is_ready(tab: Tab, models: Path) -> None:
    page = tab.open("#/models")
    page.get_by_role("button", name="Load slow").click()
    page.get_by_role("dialog").get_by_role("button", name="Load").click()
    page.get_by_role("progressbar", name="load slow version 1").wait_for()
    row(page, "slow").filter(has_text="starting slow_0_cpu, 1 of 2").wait_for()  # it may be there before it starts
    assert "loading" in row(page, "slow").inner_text()
    (models / "go").touch()
    page.wait_for_function("() => !document.querySelector('.loading:not([hidden])')")
    page.wait_for_function("() => document.querySelectorAll('.badge.good').length === 3")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_passes_the_accessibility_check(browser: Any, server: str, scheme: str) -> None:
    tab = Tab(browser, server, color_scheme=scheme)
    page = tab.open("#/requests")
    page.wait_for_selector("main h1")
    page.wait_for_timeout(500)
    assert tab.findings() == []
    tab.close()
