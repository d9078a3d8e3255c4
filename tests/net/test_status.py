# SPDX-License-Identifier: Apache-2.0
"""The one table from our error codes to HTTP, row by row: a number here is a promise to clients and to their retries."""

from __future__ import annotations

from http import HTTPStatus

import pytest

from headrace.core.errors import Code
from headrace.net.http.heads import HTTP_STATUS, REASON

TABLE = {
    "invalid_argument": 400,
    "not_found": 404,
    "already_exists": 409,
    "unauthenticated": 401,
    "permission_denied": 403,
    "failed_precondition": 409,
    "too_large": 413,
    "resource_exhausted": 429,
    "deadline_exceeded": 504,
    "cancelled": 499,
    "unimplemented": 501,
    "unavailable": 503,
    "internal": 500,
}


@pytest.mark.parametrize("code", Code, ids=lambda code: code.value)
def test_row(code: Code) -> None:
    assert HTTP_STATUS[code] == TABLE[code.value]


def test_there_are_no_other_rows() -> None:
    assert {code.value for code in HTTP_STATUS} == set(TABLE)


@pytest.mark.parametrize("status", sorted(set(TABLE.values())))
def test_every_status_has_a_reason(status: int) -> None:
    assert REASON[status]
    assert REASON[status].isascii()
    assert b"\r" not in REASON[status]
    assert b"\n" not in REASON[status]


def test_reasons_are_those_of_the_standard() -> None:
    for status in HTTPStatus:
        assert REASON[status.value] == status.phrase.encode()


def test_what_a_client_may_retry() -> None:
    """Proxies and clients retry 429, 503 and 504, and nothing else of ours: only errors that pass may map there."""
    retried = {code for code, status in HTTP_STATUS.items() if status in (429, 503, 504)}
    assert retried == {Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED}
