# SPDX-License-Identifier: Apache-2.0
"""`headrace.asgi:app`: the HTTP surface of `headrace serve` for those who must run it under another server.

    INFERENCE_CONFIG=config/inference.yaml uvicorn headrace.asgi:app --port 8080
    INFERENCE_MODEL_PATH=models/production gunicorn headrace.asgi:app -w 4 -k uvicorn_worker.UvicornWorker

Configured by the file and the environment, as the command is; `server` says nothing here, since the host has the ports.
gRPC is not offered, and a request costs more than twice what it does under `headrace serve`: see docs/guides/asgi.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.programs.serve.asgi import HostedServer
from headrace.programs.serve.settings import ServerSettings


@contextmanager
def _settings() -> Iterator[ServerSettings]:
    from headrace.cli.serve_settings import open_settings
    from headrace.core.telemetry.progress import silent
    from headrace.programs.configuration.resolution import configure

    with open_settings(configure({}, (), os.environ), silent) as settings:
        yield settings


app = HostedServer(_settings)
