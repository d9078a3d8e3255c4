# SPDX-License-Identifier: Apache-2.0
"""A server of OpenAI's protocol and v2 over a folder of real, if tiny, models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.api.openai.http import OpenAiHttp
from headrace.api.openai.settings import OpenAiSettings
from headrace.api.v2.http import V2Http
from headrace.engine.engine import Engine, EngineSettings, open_engine
from headrace.engine.repository.settings import RepositorySettings
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from support.serving import Serving, serving


@contextmanager
def served(folder: Path, settings: OpenAiSettings | None = None) -> Iterator[Serving]:
    engines: list[Engine] = []

    async def site() -> Site:
        engines.append(open_engine(EngineSettings(repositories=(folder,), repository=RepositorySettings(), gpus=0)))
        await engines[0].start()
        routes = Routes()
        V2Http(engines[0].plane).add_to(routes)
        OpenAiHttp(engines[0].plane, settings).add_to(routes)
        return Site(routes)

    with serving(site) as running:
        yield running
        running.call(engines[0].close, 5)
