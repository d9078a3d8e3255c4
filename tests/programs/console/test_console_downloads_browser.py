# SPDX-License-Identifier: Apache-2.0
"""A model that comes from an object store while somebody looks on, in a real Chromium: its bar, and then its state.

The store is a stand-in on loopback that checks signatures and sends when it is told to; the model is a real ONNX file.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import pytest
from console_models import write_identity
from console_process import console_server
from console_tab import Tab
from store_stub import ACCESS, SECRET, StoreStub
from test_console_browser import row

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]
_MEAN = """
<ir_version: 8, opset_import: ["" : 17]>
mean (float[batch, 2] X) => (float[batch, 1] Y) { Y = ReduceMean <axes = [1], keepdims = 1> (X) }
"""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreStub]:
    write_identity(tmp_path / "models", "echo")
    config = (tmp_path / "models" / "echo" / "config.pbtxt").read_bytes()
    with StoreStub({"bucket": {"models/echo/config.pbtxt": config, "models/echo/1/": b""}}) as made:
        claims = {
            "AWS_ACCESS_KEY_ID": ACCESS,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-west-1",
            "AWS_ENDPOINT_URL": made.url(""),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }
        for name, value in claims.items():
            monkeypatch.setenv(name, value)
        yield made


def test_a_download_has_a_bar_until_it_serves(browser: Any, store: StoreStub, tmp_path: Path) -> None:
    go = threading.Event()
    store.before = lambda key: key.endswith(".onnx") and not go.wait(120)  # type: ignore[assignment, return-value]
    with console_server(tmp_path / "log", "s3://bucket/models", "--repository-poll-secs", "1") as url:
        tab = Tab(browser, url)
        page = tab.open("#/models")
        row(page, "echo").wait_for()
        bars = page.get_by_role("list", name="Downloads")
        assert not bars.is_visible()
        model = onnx.parser.parse_model(_MEAN).SerializeToString()
        store.buckets["bucket"] |= {"models/mean/1/labels.txt": b"mean\n" * 100_000, "models/mean/1/model.onnx": model}
        try:
            bars.get_by_role("progressbar").wait_for()
            page.get_by_text("of 488 KiB").wait_for()
            assert tab.findings() == []
            tab.picture("bringing")
        finally:
            go.set()
        bars.wait_for(state="hidden")
        row(page, "mean").get_by_text("ready", exact=True).wait_for()
        tab.close()
