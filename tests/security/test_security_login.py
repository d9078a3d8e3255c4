# SPDX-License-Identifier: Apache-2.0
"""What a refused login tells (test 14). Hashes, their costs, tokens and lock-outs are held by `tests/api/access`."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import pytest
from job_api import ORG, Api, JobAnswer, StandInJobs, job_api


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with job_api(StandInJobs(), tmp_path_factory.mktemp("login")) as api:
        yield api


def login(api: Api, key: str, org: str = ORG) -> JobAnswer:
    return api.ask("POST", "/api/v1/login", {"ngc_key": key, "ngc_org_name": org})


def test_unknown_removed_and_mistyped_users_read_the_same(gateway: Api) -> None:
    gone = gateway.server.call(gateway.access.users.add, "gone", ORG, "viewer")[1]
    assert login(gateway, gone).status == 200
    gateway.server.call(gateway.access.users.remove, "gone")
    real = gateway.keys["alice"]
    mistyped = real[:-1] + ("a" if real[-1] != "a" else "b")
    received = [login(gateway, key) for key in ("nvapi-" + "x" * (len(real) - 6), gone, mistyped)]
    assert {(got.status, got.body) for got in received} == {(401, received[0].body)}
    assert real.encode() not in received[2].body and mistyped.encode() not in received[2].body


def test_the_existence_of_an_organisation_is_not_exposed(gateway: Api) -> None:
    other, none = (login(gateway, gateway.keys["alice"], org) for org in ("other", "never"))
    assert (other.status, none.status) == (401, 401)
    assert other.body.replace(b"other", b"?") == none.body.replace(b"never", b"?")


def part(document: dict[str, object]) -> str:
    return base64.urlsafe_b64encode(json.dumps(document).encode()).decode().rstrip("=")


@pytest.mark.parametrize(
    "head",
    [{"alg": "none"}, {"alg": "None"}, {"alg": "RS256"}, {"alg": "HS256", "kid": "../../dev/null"}, {"alg": "HS256"},
     {"alg": "HS256", "kid": "' or 1=1 --"}, {"alg": "HS256", "jku": "http://127.0.0.1:1/keys"}, {"alg": ["HS256"]},
     {"alg": "HS256", "jwk": {"kty": "oct", "k": "AA"}}, {"alg": "HS256", "kid": 1}, {"alg": "HS256", "crit": ["x"]}],
    ids=lambda head: json.dumps(head),
)  # fmt: skip
def test_a_token_does_not_choose_its_algorithm(gateway: Api, head: dict[str, object]) -> None:
    claims = gateway.login("victor").split(".")[1]
    for signature in ("", "AA", base64.urlsafe_b64encode(b"\0" * 32).decode().rstrip("=")):
        got = gateway.ask("GET", f"/api/v1/orgs/{ORG}/workspaces", token=f"{part(head)}.{claims}.{signature}")
        assert got.status == 401, got.body
        assert b"dev/null" not in got.body and b"Traceback" not in got.body


def test_a_credential_that_is_not_text_is_refused(gateway: Api) -> None:
    for sent in ("Bearer", "Bearer ", "Bearer  x", "bearer\tx", "Basic", "Basic " + "A" * 7000, "Digest x", "\xff\xfe"):
        got = gateway.ask("GET", f"/api/v1/orgs/{ORG}/workspaces", fields={"Authorization": sent})
        assert got.status == 401, (sent[:40], got.body)
