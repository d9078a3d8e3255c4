# SPDX-License-Identifier: Apache-2.0
"""The console in a real Chromium, against a real server: what a person does, with the mouse or with the keyboard alone.

Whatever a test does, the browser must have nothing to complain of and must have asked this server only: `console_tab`.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from console_models import write_all, write_plain
from console_process import INFER, ask, console_server
from console_tab import BRIGHTNESS, Tab

from headrace.api.access.api_keys import create_key
from headrace.version import __version__

EXPLICIT = ("--model-control-mode", "explicit", "--load-model", "*", "--model-load-thread-count", "1")

PLACES = ["", "#/models", "#/models/river", "#/models/llama", "#/models/broken", "#/requests"]
PLACES += ["#/playground/echo", "#/playground/finder", "#/playground/llama", "#/traffic"]
PHONE = {"width": 390, "height": 844}

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers', while models are made
        models = write_all(tmp_path_factory.mktemp("console_all"))
    with console_server(tmp_path_factory.mktemp("console_log") / "log", models, *EXPLICIT) as url:
        yield url


@pytest.fixture
def tab(browser: Any, server: str) -> Iterator[Tab]:
    tab = Tab(browser, server)
    yield tab
    tab.close()


def row(page: Any, model: str) -> Any:
    return page.locator("tbody tr", has=page.get_by_role("rowheader", name=model, exact=True))


def row_names(place: Any) -> list[str]:
    """The names of a table's rows, as soon as it has any: a page is drawn before its data has come."""
    headers = place.get_by_role("rowheader")
    headers.first.wait_for()
    names: list[str] = headers.all_inner_texts()
    return names


def lamp() -> bytes:
    """A bright square in the dark, from (40, 20) to (120, 100) of 160 x 120."""
    import io

    from PIL import Image

    image, made = Image.new("RGB", (160, 120), (20, 20, 40)), io.BytesIO()
    image.paste((255, 240, 200), (40, 20, 120, 100))
    image.save(made, "PNG")
    return made.getvalue()


def test_models_are_shown_and_found(tab: Tab) -> None:
    page = tab.open("#/models")
    page.wait_for_selector("text=7 models, 8 versions")
    assert "ready" in row(page, "echo").inner_text()
    assert "Copy or export it again" in row(page, "broken").inner_text()
    tab.picture("models")
    page.get_by_label("Search").fill("riv")
    page.wait_for_selector("text=1 model, 2 versions")
    assert page.locator("tbody tr").count() == 2
    page.get_by_label("Search").fill("riv unavailable")
    page.wait_for_selector("text=No model matches.")
    page.get_by_label("Search").fill("")
    page.get_by_label("State", exact=True).select_option("UNAVAILABLE")
    page.wait_for_selector("text=1 model, 1 version")


def test_unload_and_load_need_a_confirmation(tab: Tab, server: str) -> None:
    page = tab.open("#/models")
    page.get_by_role("button", name="Unload echo").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert ask(f"{server}/v2/models/echo/ready").status == 200
    page.get_by_role("button", name="Unload echo").click()
    page.get_by_role("dialog").get_by_role("button", name="Unload").click()
    page.wait_for_selector("text=echo is unloaded.")
    assert ask(f"{server}/v2/models/echo/ready").status != 200
    page.get_by_role("button", name="Load echo").click()
    page.get_by_role("dialog").get_by_role("button", name="Load").click()
    page.wait_for_selector("text=echo is loaded.")
    assert ask(f"{server}/v2/models/echo/ready").status == 200


def test_a_model_sleeps_and_wakes(tab: Tab, server: str) -> None:
    page = tab.open("#/models")
    page.get_by_role("button", name="Sleep llama").click()
    page.get_by_role("dialog").get_by_role("button", name="Sleep").click()
    page.wait_for_selector("text=llama is asleep.")
    row(page, "llama").get_by_text("asleep", exact=True).wait_for()
    page.get_by_role("button", name="Wake llama").click()
    page.get_by_role("dialog").get_by_role("button", name="Wake").click()
    page.wait_for_selector("text=llama is awake.")
    page.get_by_role("button", name="Sleep llama").wait_for()
    assert not page.get_by_role("button", name="Sleep echo").count()


def test_a_form_from_the_schema(tab: Tab) -> None:
    page = tab.open("#/playground/echo")
    page.get_by_label("Values (JSON list").fill("[1, 2.5, 3, 4]")
    page.get_by_role("button", name="Send").click()
    page.wait_for_selector("text=echo version 1 answered")
    assert page.get_by_role("region", name="Values of OUTPUT0").inner_text().split() == ["1", "2.5", "3", "4"]
    assert '"data":[1,2.5,3,4]' in page.get_by_role("region", name="curl code").inner_text()
    tab.picture("tensors")
    page.get_by_label("Values (JSON list").fill("[1, 2]")
    page.get_by_role("button", name="Send").click()
    page.wait_for_selector("text=2 values do not fill the shape [1, 4], which has 4")


def run_code(page: Any, folder: Path) -> list[str]:
    """What the programs beside a form print: with curl, and with a client."""
    page.wait_for_selector("details pre")
    claims: dict[str, str] = {}
    names = [name for name in page.locator("summary").all_inner_texts() if name != "Outputs"]
    for name in sorted(names, key="curl".__eq__):  # curl sends a file that the Python beside it could have written
        code = page.get_by_role("region", name=f"{name} code", include_hidden=True).text_content()
        program = "bash" if name == "curl" else sys.executable
        if name != "curl" and "pixels" in code:
            code += "\npixels.tofile('pixels.raw')"
        done = subprocess.run(
            [program, "-c", code], capture_output=True, text=True, timeout=60, cwd=folder, check=False
        )
        assert done.returncode == 0, (name, done)
        claims[name] = done.stdout
    return [claims[name] for name in names]


def test_the_code_beside_it_does_the_same(tab: Tab, tmp_path: Path) -> None:
    page = tab.open("#/playground/echo")
    page.get_by_label("Values (JSON list").fill("[1, 2, 3, 41]")
    page.get_by_role("button", name="Send").click()
    page.wait_for_selector("text=echo version 1 answered")
    assert [word for word in run_code(page, tmp_path) if "41" not in word] == []

    (tmp_path / "picture.jpg").write_bytes(lamp())  # whatever its name says
    page = tab.open("#/playground/finder")
    page.wait_for_selector(".drop")
    assert [word for word in run_code(page, tmp_path) if "0.9" not in word or "lamp" not in word] == []

    page = tab.open("#/playground/llama")
    page.get_by_label("Max tokens").fill("4")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Message").fill("the sea")
    page.get_by_label("System prompt").focus()
    curl, openai = run_code(page, tmp_path)
    outputs = [json.loads(line[6:]) for line in curl.splitlines() if line.startswith("data: {")]
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in outputs if event["choices"]]
    assert "[DONE]" in curl and "".join(pieces).strip() == openai.strip() != ""


def test_a_picture_by_drag_and_drop_has_its_boxes_drawn(tab: Tab) -> None:
    page = tab.open("#/playground/finder")
    page.wait_for_selector(".drop")
    page.evaluate(
        """async (text) => {
            const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
            const carried = new DataTransfer();
            carried.items.add(new File([bytes], "lamp.png", { type: "image/png" }));
            const place = document.querySelector(".drop");
            for (const kind of ["dragover", "drop"]) {
                place.dispatchEvent(new DragEvent(kind, { dataTransfer: carried, bubbles: true, cancelable: true }));
            }
        }""",
        base64.b64encode(lamp()).decode(),
    )
    page.wait_for_selector("canvas[data-boxes='1']")
    page.wait_for_selector("text=lamp, 0.90")
    # The frame around the bright square, and the dark beside it, as they are on the canvas.
    colours = page.evaluate(
        """() => {
            const { data } = document.querySelector("canvas").getContext("2d").getImageData(0, 0, 160, 120);
            const places = [[40, 60], [80, 20], [120, 60], [150, 60]];
            return places.map(([x, y]) => [...data.slice(4 * (160 * y + x), 4 * (160 * y + x) + 3)]);
        }"""
    )
    frame, dark = colours[:3], colours[3]
    assert all(red > 200 and green < 150 for red, green, _ in frame), colours
    assert dark == [20, 20, 40]
    tab.picture("picture")
    page.get_by_label("Minimum score").fill("0")
    page.wait_for_selector("canvas[data-boxes='2']")


def test_models_of_hugging_face_take_pictures(tab: Tab) -> None:
    page = tab.open("#/playground/resnet")
    picture = {"name": "lamp.png", "mimeType": "image/png", "buffer": lamp()}
    page.get_by_label("Picture", exact=True).nth(-1).set_input_files(picture)
    page.wait_for_selector("text=resnet version 1 answered")
    assert page.locator(".result tbody tr").count() >= 2
    page = tab.open("#/playground/rt_detr")
    page.get_by_label("Width").fill("64")
    page.get_by_label("Height").fill("64")
    page.get_by_label("Scores").select_option("sigmoid")
    page.get_by_label("Minimum score").fill("0")
    page.locator("input[type=file]").set_input_files(picture)
    page.wait_for_selector("canvas[data-boxes='6']")


def test_a_chat_is_streamed(tab: Tab) -> None:
    page = tab.open("#/playground/llama")
    page.wait_for_selector(".talk", state="attached")
    lengths = page.evaluate_handle(
        """() => {
            const seen = new Set();
            new MutationObserver(() => seen.add(document.querySelector(".said.assistant span")?.textContent.length))
                .observe(document.querySelector(".talk"), { childList: true, subtree: true, characterData: true });
            return seen;
        }"""
    )
    page.get_by_label("Max tokens").fill("48")
    page.get_by_label("Temperature").fill("0")  # else it may end with its first word, by chance
    page.get_by_label("Message").fill("the quick brown fox")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=First token after")
    assert len(page.evaluate("(seen) => [...seen]", lengths)) > 1  # it grew, by as much as had come since the last look
    assert page.locator(".said").count() == 2
    assert '"stream":true' in page.get_by_role("region", name="curl code").inner_text()
    tab.picture("chat")
    page.get_by_label("Message").fill("again")
    page.get_by_role("button", name="Send").click()
    page.wait_for_function("() => document.querySelectorAll('.said').length === 4")


def test_charts_follow_the_traffic(tab: Tab, server: str) -> None:
    over = threading.Event()

    def busy() -> None:
        while not over.is_set():
            ask(f"{server}/v2/models/river/infer", INFER)
            time.sleep(0.005)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        page = tab.open("#/models/river")
        label = """() => {}.test(document.querySelector('.plot[aria-label^="{}"]').ariaLabel)"""
        page.wait_for_function(label.format(r"/answered [1-9][0-9.]*( k)?\/s/", "Requests"))
        page.wait_for_function(label.format("/p99 [0-9.]+ ms/", "Latency"))
        page.get_by_role("progressbar", name=re.compile("idle instance: [1-9]")).wait_for()
        page.get_by_role("progressbar", name=re.compile("1 row: [1-9]")).wait_for()
        page.get_by_role("cell", name="idle instance").first.wait_for()
        # Another range has the same newest values, and more of the past.
        page.get_by_role("group", name="Time range").get_by_role("button", name="1 h").click()
        page.wait_for_function(label.format(r"/answered [1-9][0-9.]*( k)?\/s/", "Requests"))
    finally:
        over.set()
        thread.join()


def test_the_overview_describes_this_server(tab: Tab, server: str) -> None:
    page = tab.open()
    about = page.get_by_role("region", name="Server", exact=True)
    about.get_by_text(__version__).wait_for()
    reported = about.inner_text()
    assert server in reported and "gRPC" in reported and "7 of 8" not in reported and "6 of 7" in reported
    failed = page.get_by_role("region", name="1 model failed to load")
    assert "Copy or export it again" in failed.inner_text()
    for name, path in (("API documentation", "docs"), ("Prometheus metrics", "metrics")):
        assert about.get_by_role("link", name=name).get_attribute("href") == path
        assert ask(f"{server}/{path}").status == 200
    failed.get_by_role("link", name="broken").click()
    page.get_by_role("heading", name="broken").wait_for()
    page.get_by_role("alert").get_by_text("Copy or export it again").wait_for()


def test_a_model_has_its_page(tab: Tab, server: str) -> None:
    wrong = {"id": "mistaken", "inputs": [{**INFER["inputs"][0], "shape": [2, 2]}]}
    assert ask(f"{server}/v2/models/river/infer", wrong).status == 400
    page = tab.open("#/models")
    row(page, "river").first.get_by_role("link", name="river", exact=True).click()
    page.get_by_role("heading", name="river").wait_for()
    assert row_names(page.get_by_role("table", name="Inputs")) == ["INPUT0"]
    assert row_names(page.get_by_role("table", name="Outputs")) == ["OUTPUT0"]
    page.get_by_text("dynamic batching").first.wait_for()
    versions = page.get_by_role("region", name="Table of versions")
    assert row_names(versions) == ["1", "2"]
    assert page.get_by_role("table", name="Instances").get_by_role("row").count() == 2
    page.get_by_role("region", name="Table of errors").get_by_text("mistaken").wait_for()
    page.get_by_text("Show as JSON").click()
    assert '"max_batch_size": 8' in page.get_by_role("region", name="Configuration", exact=True).last.inner_text()
    page.get_by_role("button", name="Unload river").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    page.get_by_role("link", name="Try river").click()
    page.get_by_role("heading", name="Playground").wait_for()


def test_a_language_model_has_its_own_charts(tab: Tab, server: str) -> None:
    body = {"model": "llama", "messages": [{"role": "user", "content": "the sea"}], "max_tokens": 8}
    assert ask(f"{server}/v1/chat/completions", body).status == 200
    page = tab.open("#/models/llama")
    page.locator('.plot[aria-label^="Time to first token: p50 "]').wait_for()
    titles = page.locator("figcaption").all_inner_texts()
    assert {"Inter-token latency", "Tokens", "Sequences", "KV cache", "Prefix cache hit rate"} <= set(titles)
    assert not [title for title in titles if "atch size" in title]
    page.wait_for_function("() => document.querySelector('.plot canvas')")


def test_tables_are_cards_on_a_phone(browser: Any, server: str) -> None:
    tab = Tab(browser, server)
    tab.page.set_viewport_size(PHONE)
    page = tab.open("#/models")
    echo = row(page, "echo")
    echo.wait_for()
    box, cell = echo.bounding_box(), echo.get_by_role("cell").nth(1).bounding_box()
    assert box["width"] <= PHONE["width"] and box["height"] > 3 * cell["height"]
    label = "(cell) => getComputedStyle(cell, '::before').content"
    assert echo.get_by_role("cell").nth(1).evaluate(label) == '"State"'
    page.get_by_role("button", name="Unload echo").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    tab.close()


def test_an_error_clears_the_timeline_and_code_is_copied(tab: Tab) -> None:
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = tab.open("#/playground/echo")
    page.get_by_role("button", name="Send").click()
    timeline = page.get_by_role("region", name="Request timeline")
    timeline.get_by_role("table").wait_for()
    page.get_by_label("Values (JSON list").fill("[1, 2]")
    page.get_by_role("button", name="Send").click()
    page.get_by_text("2 values do not fill").wait_for()
    assert not timeline.get_by_role("table").count()
    code = page.get_by_role("region", name="curl code")
    assert code.evaluate("(pre) => pre.scrollWidth <= pre.clientWidth")
    page.get_by_role("button", name="Copy the curl code").click()
    page.get_by_text("Copied.").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == code.inner_text()
    page = tab.open("#/playground/llama")
    page.get_by_label("Message").wait_for()
    assert not page.locator("input[type=file]").count()
    box = page.locator("form.chat").bounding_box()
    assert box["height"] > 0.8 * page.viewport_size["height"]


def test_the_report_of_a_split(tab: Tab, server: str) -> None:
    page = tab.open()
    assert not page.get_by_role("link", name="A/B").is_visible()
    assert ask(f"{server}/admin/traffic/river", {"weights": {"1": 0.5, "2": 0.5}}).status == 200
    try:
        for _ in range(20):
            ask(f"{server}/v2/models/river/infer", INFER)
        page.reload()
        page.get_by_role("link", name="A/B").click()
        page.get_by_role("heading", name="river").wait_for()
        table = page.get_by_role("table").first
        table.wait_for()
        assert table.get_by_role("row").count() == 3
        counts = [int(text) for text in page.locator("table").first.locator("tbody td:nth-child(5)").all_inner_texts()]
        assert sum(counts) == 20
        assert tab.findings() == []
    finally:
        ask(f"{server}/admin/traffic/river", {"weights": {"2": 1}})


def test_light_and_dark(browser: Any, server: str) -> None:
    for scheme, bright in (("light", True), ("dark", False)):
        tab = Tab(browser, server, color_scheme=scheme)
        page = tab.open("#/models")
        assert (page.evaluate(BRIGHTNESS) > 128) is bright
        page.get_by_role("button", name="Theme").click()
        assert page.evaluate(BRIGHTNESS) > 128
        page.get_by_role("button", name="Theme").click()
        assert page.evaluate(BRIGHTNESS) < 128
        page.reload()
        page.wait_for_selector("tbody tr")
        assert page.evaluate(BRIGHTNESS) < 128
        tab.picture("dark")
        tab.close()


def test_the_keyboard_is_enough(tab: Tab, server: str) -> None:
    page = tab.open("#/models")
    page.wait_for_selector("tbody tr")

    page.keyboard.press("/")
    page.keyboard.type("echo")
    page.wait_for_selector("text=1 model, 1 version")
    tab.tab_to("Unload echo")
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    assert tab.focused() == "Unload echo"
    assert ask(f"{server}/v2/models/echo/ready").status == 200
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    assert tab.focused() == "Try echo"
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Playground").wait_for()
    page.wait_for_selector("button:has-text('Send')")
    tab.tab_to("Send")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=echo version 1 answered")


def test_a_key_is_requested_and_sent_in_a_header(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys.yaml"
    key = create_key(keys, "root", ["admin", "read", "infer"], created=0)
    with console_server(tmp_path / "log", write_plain(tmp_path), *EXPLICIT, "--api-keys-file", keys) as url:
        tab = Tab(browser, url)
        sent: list[str] = []
        tab.page.on("request", lambda request: sent.append(request.headers.get("authorization", "")))
        tab.page.goto(f"{url}/console")
        tab.page.get_by_label("API key").last.fill("wrong")
        tab.page.keyboard.press("Enter")
        tab.page.wait_for_selector("text=this API key is not known here")
        tab.page.get_by_label("API key").last.fill(key)
        tab.page.keyboard.press("Enter")
        tab.page.get_by_role("link", name="Models", exact=True).click()
        row(tab.page, "echo").wait_for()
        assert f"Bearer {key}" in sent
        assert not [address for address in tab.asked if key in address]
        page = tab.open("#/playground/echo")
        page.get_by_label("Values (JSON list").fill("[1, 2, 3, 41]")
        page.get_by_role("button", name="Send").click()
        page.wait_for_selector("text=echo version 1 answered")
        assert key not in page.content()
        monkeypatch.setenv("HEADRACE_KEY", key)
        assert [word for word in run_code(page, tmp_path) if "41" not in word] == []
        # A browser tells of each answer that is a refusal; those were meant.
        tab.complaints = [text for text in tab.complaints if "401" not in text]
        tab.close()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_passes_the_accessibility_check(browser: Any, server: str, place: str, scheme: str) -> None:
    tab = Tab(browser, server, color_scheme=scheme)
    for size in (None, PHONE):
        if size is not None:
            tab.page.set_viewport_size(size)
        page = tab.open(place)
        page.wait_for_selector("main h1")
        page.wait_for_timeout(500)
        assert not tab.findings(), size
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, (size, wide)
    tab.close()
