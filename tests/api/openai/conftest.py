# SPDX-License-Identifier: Apache-2.0
"""A server with models that say what they are told to, and OpenAI's own client for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI
from openai_server import OpenAiServer, openai_server_with_models


@pytest.fixture(scope="session")
def openai_server() -> Iterator[OpenAiServer]:
    with openai_server_with_models() as server:
        yield server


@pytest.fixture
def client(openai_server: OpenAiServer) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"http://127.0.0.1:{openai_server.port}/v1", api_key="none", max_retries=0, timeout=60
    ) as made:
        yield made
