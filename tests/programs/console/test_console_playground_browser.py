# SPDX-License-Identifier: Apache-2.0
"""The playground in a real Chromium: pictures and videos in a chat, and the timelines of a chat and of a picture."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from console_models import write_finder, write_llama, write_seer
from console_process import console_server
from console_tab import Tab
from media_files import video
from test_console_browser import lamp

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    models = tmp_path_factory.mktemp("asking_models")
    write_finder(models)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers', while models are made
        write_llama(models)
        write_seer(models)
    one = ("--model-load-thread-count", "1")
    with console_server(tmp_path_factory.mktemp("asking_log") / "log", models, *one) as url:
        yield url


@pytest.fixture
def tab(browser: Any, server: str) -> Iterator[Tab]:
    tab = Tab(browser, server)
    yield tab
    tab.close()


def say(page: Any, text: str, tokens: int) -> None:
    """Send a message and wait for all of the answer."""
    page.get_by_label("Max tokens").fill(str(tokens))
    page.get_by_label("Temperature").fill("0")  # else it may end with its first word, by chance
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()
    page.get_by_text("First token after").wait_for()


def timeline(page: Any) -> tuple[str, list[str]]:
    """What stands above the bars of the request that was sent, and the name of each bar."""
    place = page.get_by_role("region", name="Request timeline")
    place.get_by_role("table").wait_for()
    return place.locator(".caption").inner_text(), place.get_by_role("rowheader").all_inner_texts()


def test_a_chat_has_its_timeline(tab: Tab) -> None:
    page = tab.open("#/playground/llama")
    say(page, "the quick brown fox", 24)
    caption, phases = timeline(page)
    assert re.match(r"ok, .* in all, [1-9]\d* answers", caption)
    assert phases[-3:] == ["computed, to the first answer", "the other answers", "encoded and sent"]
    assert tab.findings() == []
    assert not page.get_by_text("Batch of").count()


def test_a_picture_has_its_timeline(tab: Tab) -> None:
    page = tab.open("#/playground/finder")
    page.locator("input[type=file]").set_input_files(
        {"name": "lamp.png", "mimeType": "image/png", "buffer": lamp()},
    )
    page.wait_for_selector("canvas[data-boxes='1']")
    caption, phases = timeline(page)
    assert caption.startswith("ok, ")
    assert phases[0] == "decoded" and "computed" in phases and phases[-1] == "encoded and sent"
    page.get_by_text("Batch of 1 request").wait_for()
    assert tab.findings() == []


def test_who_wants_no_timeline_gets_none(tab: Tab) -> None:
    page = tab.open("#/playground/llama")
    page.get_by_role("checkbox", name="Request timeline").uncheck()
    say(page, "the sea", 4)
    assert not page.get_by_role("region", name="Request timeline").get_by_role("table").count()
    assert not [url for url in tab.asked if url.endswith("/console/api/requests")]


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_vision_model_is_given_an_image(tab: Tab, kind: str) -> None:
    page = tab.open("#/playground/seer")
    files = {
        "image": {"name": "lamp.png", "mimeType": "image/png", "buffer": lamp()},
        "video": {"name": "grey.mp4", "mimeType": "video/mp4", "buffer": video(frames=4)},
    }
    bodies: list[Any] = []
    page.on("request", lambda asked: asked.url.endswith("completions") and bodies.append(asked.post_data_json))
    page.get_by_label("Image or video").set_input_files(files[kind])
    say(page, "what is this", 8)
    assert page.locator(".said.user").inner_text().endswith(f"[{files[kind]['name']}]")
    assert page.locator(".said.assistant span").inner_text()
    (body,) = bodies
    words, shown = body["messages"][0]["content"]
    assert words == {"type": "text", "text": "what is this"}
    assert shown[f"{kind}_url"]["url"].startswith(f"data:{files[kind]['mimeType']};base64,")
    assert f'"{kind}_url":{{"url":"data:..."}}' in page.get_by_role("region", name="curl code").inner_text()
    assert timeline(page)[0].startswith("ok, ")
