# SPDX-License-Identifier: Apache-2.0
"""One server for most tests of this folder, OpenAI's own client for it, and a web server with media."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from language_model_server import Server, make_repository, served_in_thread
from openai import OpenAI
from web_stub import WebStub

CONFIG = """
media:
  private_hosts: ["127.0.0.1"]
  max_image_mb: 1
  max_video_mb: 2
  fetch_timeout_s: 10
"""
"""Other addresses of the loopback network stay private."""


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_repository(tmp_path_factory.mktemp("language_models"))


@pytest.fixture(scope="session")
def served(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("language_server")
    (folder / "config.yaml").write_text(CONFIG)
    with served_in_thread(repository, "--config", folder / "config.yaml") as server:
        yield server


@pytest.fixture
def client(served: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=served.base_url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="session")
def web() -> Iterator[WebStub]:
    with WebStub() as stub:
        yield stub
