# SPDX-License-Identifier: Apache-2.0
"""A real `headrace serve` for the console, in a process of its own.

with console_server(tmp_path / "log", models, "--workers", "2") as url:
    requests to f"{url}/console"
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

_HEADRACE = Path(sys.executable).parent / "headrace"
_LISTENING = re.compile(r"listening on 127\.0\.0\.1:(\d+)")
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
    environment = os.environ | {"NO_COLOR": "1", "TERM": "dumb", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [_HEADRACE, "serve", *arguments, "--http-port", "0", "--grpc-port", "0"],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        while log.read_text().count("model(s)") < workers:
            assert process.poll() is None, log.read_text()
            time.sleep(0.02)
        yield f"http://127.0.0.1:{_LISTENING.findall(log.read_text())[0]}"
    finally:
        process.terminate()
        try:
            code = process.wait(100)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
    assert code == 0, log.read_text()
