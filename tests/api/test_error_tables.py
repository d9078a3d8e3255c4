# SPDX-License-Identifier: Apache-2.0
"""What each error of ours is called by each protocol. Clients decide by these numbers and names whether to ask again."""

from __future__ import annotations

import pytest

from headrace.api.openai.errors import _KINDS as OPENAI
from headrace.api.v1.status import _CODES as V1
from headrace.core.errors import Code
from headrace.net.grpc.status import GRPC_STATUS
from headrace.net.http.heads import HTTP_STATUS

REQUEST, SERVER = "invalid_request_error", "server_error"
EXPECTED = {
    # HTTP, gRPC, TensorRT Inference Server, OpenAI (status, type and code; None: HTTP's status, and the request's fault).
    Code.INVALID_ARGUMENT: (400, "INVALID_ARGUMENT", "INVALID_ARG", None),
    Code.NOT_FOUND: (404, "NOT_FOUND", "NOT_FOUND", (404, REQUEST, "not_found")),
    Code.ALREADY_EXISTS: (409, "ALREADY_EXISTS", "ALREADY_EXISTS", None),
    Code.UNAUTHENTICATED: (401, "UNAUTHENTICATED", "UNSUPPORTED", (401, REQUEST, "invalid_api_key")),
    Code.PERMISSION_DENIED: (403, "PERMISSION_DENIED", "UNSUPPORTED", (403, REQUEST, "permission_denied")),
    Code.FAILED_PRECONDITION: (409, "FAILED_PRECONDITION", "UNSUPPORTED", (400, REQUEST, None)),
    Code.TOO_LARGE: (413, "RESOURCE_EXHAUSTED", "INVALID_ARG", None),
    Code.RESOURCE_EXHAUSTED: (
        429,
        "RESOURCE_EXHAUSTED",
        "UNAVAILABLE",
        (429, "rate_limit_error", "rate_limit_exceeded"),
    ),
    Code.DEADLINE_EXCEEDED: (504, "DEADLINE_EXCEEDED", "UNAVAILABLE", (504, SERVER, "timeout")),
    Code.CANCELLED: (499, "CANCELLED", "UNAVAILABLE", None),
    Code.UNIMPLEMENTED: (501, "UNIMPLEMENTED", "UNSUPPORTED", (400, REQUEST, "unsupported")),
    Code.UNAVAILABLE: (503, "UNAVAILABLE", "UNAVAILABLE", (503, SERVER, "unavailable")),
    Code.INTERNAL: (500, "INTERNAL", "INTERNAL", (500, SERVER, None)),
}


@pytest.mark.parametrize("code", Code)
def test_every_protocol_has_its_own_name_for_an_error(code: Code) -> None:
    assert (HTTP_STATUS[code], GRPC_STATUS[code].name, V1[code], OPENAI.get(code)) == EXPECTED[code]
