# SPDX-License-Identifier: Apache-2.0
"""A real `headrace serve` for the console, in a process of its own.

with console_server(tmp_path / "log", models, "--workers", "2") as url:
    requests to f"{url}/console"
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from support.servers import serve_process
from support.waiting import eventually

INFER = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}


class Answer(NamedTuple):
    status: int
    fields: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(url: str, document: Any = None, **fields: str) -> Answer:
    """One request, whatever its status; POST if there is a document."""
    body = None if document is None else json.dumps(document).encode()
    headers = {name.replace("_", "-"): value for name, value in fields.items()}
    request = urllib.request.Request(url, body, {"content-type": "application/json", **headers})
    try:
        with _OPENER.open(request, timeout=60) as answer:
            return Answer(answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read())


class _Staying(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_Staying)


@contextmanager
def console_server(log: Path, *arguments: str | Path, workers: int = 1) -> Iterator[str]:
    """Start it on free ports and wait until each worker has tried its models; gives its address."""
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with serve_process(log, *arguments, env=environment) as server:
        eventually(lambda: server.log.count("model(s)") >= workers)
        yield server.url
