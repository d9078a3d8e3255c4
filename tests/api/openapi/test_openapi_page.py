# SPDX-License-Identifier: Apache-2.0
"""The page: all in one, with nothing from elsewhere, and allowed to do no more than it does."""

from __future__ import annotations

import base64
import hashlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from raw_requests import Answer, ask

from headrace.api.openapi.http import OpenApi
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from support.engines import builtin_plane
from support.serving import Serving, serving


async def _site() -> Site:
    routes = Routes()
    OpenApi(await builtin_plane(), routes).add_to(routes)
    return Site(routes)


@pytest.fixture(scope="module")
def page() -> Iterator[Answer]:
    with serving(_site) as server:
        yield _page(server)


def _page(server: Serving) -> Answer:
    assert ask(server.port, "HEAD", "/docs").status == 200
    return ask(server.port, "GET", "/docs")


def test_it_is_a_page(page: Answer) -> None:
    assert page.status == 200
    assert page.fields["content-type"] == "text/html; charset=utf-8"
    text = page.body.decode()
    assert text.startswith("<!DOCTYPE html>") and 'lang="en"' in text
    assert "/*STYLE*/" not in text and "/*SCRIPT*/" not in text


def _between(page: Answer, tag: str) -> str:
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page.body.decode(), re.DOTALL)
    return str(content)


def test_it_may_run_and_wear_only_what_is_in_it(page: Answer) -> None:
    policy = dict(part.strip().split(" ", 1) for part in page.fields["content-security-policy"].split(";"))
    for tag, name in (("script", "script-src"), ("style", "style-src")):
        digest = base64.b64encode(hashlib.sha256(_between(page, tag).encode()).digest()).decode()
        assert policy[name] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert page.fields["x-content-type-options"] == "nosniff"
    assert page.fields["x-frame-options"] == "DENY"


def test_it_needs_nothing_from_elsewhere(page: Answer) -> None:
    text = page.body.decode()
    assert not re.search(r"https?://|//[a-z]+\.[a-z]+/|@import|url\(", text)
    assert not re.search(r"""\b(src|href)\s*=\s*["'](?!openapi\.json|#groups)""", text)
    assert not re.search(r"""\son[a-z]+\s*=\s*["']|\sstyle\s*=""", text.split("<script>")[0])


def test_text_from_the_server_never_becomes_markup(page: Answer) -> None:
    script = _between(page, "script")
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc|javascript:", script
    )


def test_its_parts_are_installed_with_the_package() -> None:
    root = Path(__file__).parents[3]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["headrace"]
    for part in (root / "headrace/api/openapi/assets").iterdir():
        assert any(part in (root / "headrace").glob(pattern) for pattern in patterns), part
