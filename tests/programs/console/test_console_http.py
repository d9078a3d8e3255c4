# SPDX-License-Identifier: Apache-2.0
"""The console without a browser: what is sent, with which heads, to whom, and what the live document says."""

from __future__ import annotations

import asyncio
import gzip
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from console_models import write_plain
from console_process import INFER, ask, console_server

from headrace.api.access.api_keys import create_key
from headrace.api.v2.settings import Restriction, V2Settings
from headrace.core.telemetry.tracing import NO_TRACING
from headrace.engine.engine import EngineSettings, open_engine
from headrace.net.sockets import Address
from headrace.programs.console.http import FLEET, GATEWAY, SERVER, Page, Pages
from headrace.programs.console.live_data import add_counts
from headrace.programs.serve.protocols import build_protocols
from headrace.programs.serve.settings import ServerSettings
from support.servers import serve_in_thread

ROOT = Path(__file__).parents[3]
ASSETS = ROOT / "headrace/programs/console/assets"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("console_models")
    explicit = ("--model-control-mode", "explicit", "--load-model", "*")
    with serve_in_thread(write_plain(folder), *explicit) as running:
        yield running.url


def parts(url: str) -> list[str]:
    """What the page names."""
    return re.findall(r'(?:src|href)="(console/[^"]+)"', ask(f"{url}/console").body.decode())


def test_the_page_may_run_only_files_of_this_server(server: str) -> None:
    page = ask(f"{server}/console")
    assert (page.status, page.fields["content-type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.strip().split(" ", 1) for part in page.fields["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in page.fields["content-security-policy"]
    assert page.fields["x-content-type-options"] == "nosniff"
    assert page.fields["x-frame-options"] == "DENY"
    assert not re.search(rb"<script(?![^>]*\ssrc=)|\son[a-z]+\s*=|\sstyle\s*=|<style", page.body)


def test_a_browser_revalidates_the_page_and_caches_its_files(server: str) -> None:
    page = ask(f"{server}/console")
    assert page.fields["cache-control"] == "no-cache"
    same = ask(f"{server}/console", if_none_match=page.fields["etag"])
    assert (same.status, same.body) == (304, b"")
    assert len(parts(server)) == 4
    for part in parts(server):
        file = ask(f"{server}/{part}")
        assert file.status == 200
        assert file.fields["cache-control"] == "public, max-age=31536000, immutable"
        assert file.fields["x-content-type-options"] == "nosniff"
    stale = parts(server)[0].replace("assets/", "assets/0")
    assert ask(f"{server}/{stale}").status == 404


def test_files_are_compressed_if_the_client_accepts_it(server: str) -> None:
    (script,) = [part for part in parts(server) if part.endswith("/server.js")]
    plain, packed = ask(f"{server}/{script}"), ask(f"{server}/{script}", accept_encoding="gzip")
    assert packed.fields["content-encoding"] == "gzip" and "content-encoding" not in plain.fields
    assert gzip.decompress(packed.body) == plain.body == (ASSETS / "server.js").read_bytes()
    assert packed.fields["vary"] == "accept-encoding"


def test_a_slash_too_many_leads_to_the_page(server: str) -> None:
    answer = ask(f"{server}/console/")
    assert (answer.status, answer.fields["location"]) == (308, "../console")


def test_a_browser_at_the_root_is_sent_to_the_page(server: str) -> None:
    browser = ask(f"{server}/", accept="text/html,application/xhtml+xml,*/*;q=0.8")
    assert (browser.status, browser.fields["location"]) == (302, "console")
    assert ask(f"{server}/", accept="*/*").status == 404


@pytest.mark.parametrize("page", [SERVER, GATEWAY, FLEET], ids=lambda page: page.name)
def test_each_page_is_whole(page: Page) -> None:
    pages = Pages(page)
    text = pages.page.plain.decode()
    assert "$" not in text and f"<title>{page.title}</title>" in text
    named = re.findall(rf"{pages.digest}/([\w.]+)", text)
    assert f"{page.name}.js" in named and set(named) <= pages.assets.keys()
    assert text.count('id="theme-button"') == text.count("<nav ") == 1


def test_all_of_it_is_under_200_kb_and_names_no_other_host() -> None:
    files = {path.name: path.read_text() for path in ASSETS.iterdir()}
    assert sum(len(text.encode()) for text in files.values()) < 200_000
    for name, text in files.items():
        if name.startswith("uPlot"):
            assert "://" not in text.replace("https://github.com/leeoniya/uPlot", "", 1), name
            continue
        outside = set(re.findall(r"https?://[^\s\"'`)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not outside, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc", text)
    imports = {name for text in files.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert imports <= files.keys()


def test_vendored_files_have_their_version_on_the_page_of_licences() -> None:
    (version,) = re.findall(r"uPlot \(v([\d.]+)\)", (ASSETS / "uPlot.iife.min.js").read_text()[:200])
    assert (
        f"| [uplot](https://www.npmjs.com/package/uplot) | {version} | MIT |" in (ROOT / "docs/licences.md").read_text()
    )
    assert "MIT License" in (ASSETS / "uPlot.LICENSE.txt").read_text()


def test_its_files_are_installed_with_the_package() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["headrace"]
    for part in ASSETS.iterdir():
        assert any(part in (ROOT / "headrace").glob(pattern) for pattern in patterns), part


def test_live_has_states_reasons_and_counts(server: str) -> None:
    def live_models() -> dict[str, dict[str, object]]:
        answer = ask(f"{server}/console/api/live")
        assert answer.fields["cache-control"] == "no-store"
        return {f"{model['name']}/{model['version']}": model for model in answer.json["models"]}

    before = live_models()
    assert set(before) == {"broken/1", "echo/1", "river/1", "river/2"}
    assert before["broken/1"]["state"] == "UNAVAILABLE" and "model.onnx" in str(before["broken/1"]["reason"])
    assert before["broken/1"]["numbers"] is None
    for _ in range(3):
        assert ask(f"{server}/v2/models/river/versions/1/infer", INFER).status == 200
    wrong = {"inputs": [{**INFER["inputs"][0], "shape": [2, 2]}]}
    assert ask(f"{server}/v2/models/river/versions/1/infer", wrong).status == 400
    numbers = live_models()["river/1"]["numbers"]
    assert isinstance(numbers, dict)
    assert (numbers["done"], numbers["failed"], numbers["in_flight"], numbers["waiting"]) == (3, 1, 0, 0)
    assert numbers["batches"] == {"1": 3}
    document = ask(f"{server}/console/api/live").json
    assert sum(numbers["took"]) == 3 and len(numbers["took"]) == len(document["bounds_ms"]) + 1
    assert sum(numbers["reasons"]) == 3 and len(numbers["reasons"]) == len(document["reasons"])
    assert document["process"]["cpu_seconds"] > 0 and document["process"]["memory_bytes"] > 1e6
    assert document["control"] is True and document["ready"] is False


def test_without_a_key_there_is_the_page_and_nothing_to_see(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    reader = create_key(keys, "reader", ["read"], created=0)
    caller = create_key(keys, "caller", ["infer"], created=0)
    with serve_in_thread("--api-keys-file", keys, "--host", "127.0.0.1") as running:
        url = running.url
        assert ask(f"{url}/console").status == 200
        assert [ask(f"{url}/{part}").status for part in parts(url)] == [200] * 4
        assert ask(f"{url}/console/api/live").status == 401
        assert ask(f"{url}/console/api/live", authorization=f"Bearer {caller}").status == 403
        assert ask(f"{url}/console/api/live", authorization=f"Bearer {reader}").status == 200


@pytest.mark.slow
def test_numbers_are_those_of_all_workers(tmp_path: Path) -> None:
    with console_server(tmp_path / "log", write_plain(tmp_path), "--workers", "2", workers=2) as url:
        for _ in range(24):
            assert ask(f"{url}/v2/models/echo/infer", INFER).status == 200
        (echo,) = [model for model in ask(f"{url}/console/api/live").json["models"] if model["name"] == "echo"]
        assert echo["numbers"]["done"] == sum(echo["numbers"]["took"]) == 24
        assert echo["numbers"]["batches"] == {"1": 24}


def test_it_can_be_turned_off() -> None:
    with serve_in_thread("--console", "false") as running:
        assert ask(f"{running.url}/console").status == ask(f"{running.url}/console/api/live").status == 404


@pytest.mark.parametrize(
    ("settings", "served"),
    [
        ({}, True),
        ({"allow_console": False}, False),
        # The page would be a way around the header that a part of v2 needs.
        ({"v2": V2Settings(http_restrictions=(Restriction.parse("statistics:key=value"),))}, False),
    ],
)
def test_where_it_is_served(settings: dict[str, object], served: bool) -> None:
    async def paths() -> set[str]:
        created = ServerSettings(http=Address("127.0.0.1"), grpc=None, **settings)  # type: ignore[arg-type]
        protocols = build_protocols(open_engine(EngineSettings()), created, NO_TRACING, None)
        return {path for _, path in protocols.site.routes.listed()}

    assert any(path.startswith("/console") for path in asyncio.run(paths())) is served


def test_numbers_are_added_up() -> None:
    one = {"versions": {"a/1": {"done": 1, "took": [1, 0]}}, "process": {"cpu_seconds": 1.5}}
    other = {"versions": {"a/1": {"done": 2, "took": [0, 2]}, "b/1": {"done": 4}}, "process": {"cpu_seconds": 1}}
    assert add_counts(one, other) == {
        "versions": {"a/1": {"done": 3, "took": [1, 2]}, "b/1": {"done": 4}},
        "process": {"cpu_seconds": 2.5},
    }
    assert add_counts(add_counts(one, other), {}) == add_counts(one, other)
