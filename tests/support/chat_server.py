# SPDX-License-Identifier: Apache-2.0
"""A tiny language model behind OpenAI's routes, for tests that need somebody to chat with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.api.openai.http import OpenAiHttp
from headrace.engine.engine import EngineSettings, open_engine
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from support.llm_models import tiny_llama
from support.serving import Serving, serving


@contextmanager
def chat_server(folder: Path) -> Iterator[Serving]:
    """The model is called `tiny`."""
    tiny_llama(folder / "tiny" / "1")
    (folder / "tiny" / "config.pbtxt").write_text('backend: "llm"\n')
    engines: list[Any] = []

    async def site() -> Site:
        opened = open_engine(EngineSettings(repositories=(folder,), gpus=0))
        await opened.start()
        engines.append(opened)
        routes = Routes()
        OpenAiHttp(opened.plane).add_to(routes)
        return Site(routes)

    with serving(site) as started:
        yield started
        started.call(engines[0].close, 10)
