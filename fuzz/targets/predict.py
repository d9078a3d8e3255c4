# SPDX-License-Identifier: Apache-2.0
"""Target `predict`: bodies of `/predict` get numbers, or a clear error of that protocol."""

from __future__ import annotations

import json

from fuzz.http_request import post
from fuzz.in_memory_server import Server
from fuzz.target import Check, Target, require


def _open() -> Check:
    server = Server()

    def check(data: bytes) -> None:
        for path in (b"/predict", b"/predict/any"):
            answer = post(server, path, data, (b"content-type: application/json",))
            require(answer.status in (200, 400, 404, 413, 422), f"{path!r} answered {answer.status}")
            require(bool(json.loads(answer.body)), "an empty answer")

    return check


TARGET = Target(
    "bodies of /predict: numbers or a refusal in JSON",
    _open,
    (
        b'{"inputs": [[1, 2, 3, 4]]}',
        b'"inputs"',
        b'"instances"',
        b'"data"',
        b'"INPUT0"',
        b'"parameters"',
        b'"model_version"',
        b"NaN",
        b"1e400",
        b"[[[",
        b"null",
        b"true",
        b'""',
        b"\\u0000",
    ),
)
