# SPDX-License-Identifier: Apache-2.0
"""Login and tokens over HTTP, health, version, the description of it all, and what a service reports."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import jwt
import pytest
from job_api import EXPERIMENT, JOB, ORG, Api, StandInJobs, job_api

from headrace.version import __version__

STATUS = f"/api/v1/orgs/{ORG}/experiments/{EXPERIMENT}/jobs/{JOB}/inference_microservice/status"
V2 = f"/api/v2/orgs/{ORG}/inference_microservices"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with job_api(StandInJobs(), tmp_path_factory.mktemp("entrance")) as made:
        yield made


def test_login_gives_a_token_and_who_it_is(api: Api) -> None:
    for base in ("/api/v1", "/api/v2"):
        body = {"ngc_key": api.keys["alice"], "ngc_org_name": ORG, "enable_telemetry": None}
        got = api.ask("POST", f"{base}/login", body)
        assert got.status == 200
        assert got.json.keys() == {"user_id", "token", "user_name", "user_email"}
        assert got.json["user_name"] == "alice"
        assert api.ask("GET", STATUS, token=got.json["token"]).status == 200


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"ngc_key": "bm90LWEtcGVyc29uYWwta2V5", "ngc_org_name": ORG}, 401, "legacy NGC API keys are not accepted"),
        ({"ngc_key": "nvapi-" + "x" * 64, "ngc_org_name": ORG}, 401, "unknown key"),
        ({"ngc_key": "KEY", "ngc_org_name": ""}, 401, "ngc_org_name"),
        ({"ngc_key": "KEY", "ngc_org_name": "other"}, 401, "no role in organisation"),
        ({"ngc_key": ["KEY"], "ngc_org_name": ORG}, 401, "ngc_key"),
        ({}, 401, "ngc_org_name"),
        (b"nonsense", 400, "not JSON"),
    ],
)
def test_failed_logins_state_the_reason(api: Api, body: Any, status: int, text: str) -> None:
    if isinstance(body, dict) and body.get("ngc_key") == "KEY":
        body = {**body, "ngc_key": api.keys["alice"]}
    got = api.ask("POST", "/api/v1/login", body)
    assert (got.status, got.json["error_code"]) == (status, 1), got.body
    assert text in got.json["error_desc"]
    assert status != 401 or got.json["error_desc"].startswith("Unauthorized: ")


def test_tokens_that_are_not_good(api: Api) -> None:
    token = api.login("alice")
    head = jwt.get_unverified_header(token)
    claims = jwt.decode(token, options={"verify_signature": False})
    secret = api.access.signing_keys.current.private
    expired = jwt.encode(claims | {"iat": claims["iat"] - 90_000, "exp": claims["exp"] - 90_000}, secret, headers=head)
    forged = jwt.encode(claims | {"role": "admin"}, "x" * 64, headers=head)
    nothing = base64.urlsafe_b64encode(json.dumps(head | {"alg": "none"}).encode()).decode().rstrip("=")
    unsigned = f"{nothing}.{token.split('.')[1]}."
    for bad, text in ((expired, "expired"), (forged, ""), (unsigned, ""), ("nonsense", ""), (token + "x", "")):
        got = api.ask("GET", STATUS, token=bad)
        assert (got.status, got.json["error_code"]) == (401, 1)
        assert got.json["error_desc"].startswith("Unauthorized: ")
        assert text in got.json["error_desc"]
    got = api.ask("GET", STATUS)
    assert (got.status, got.json["error_desc"]) == (401, "Unauthorized: missing token")


def test_basic_authentication_and_a_raw_key(api: Api) -> None:
    basic = base64.b64encode(f"$oauthtoken:{ORG},{api.keys['alice']}".encode()).decode()
    assert api.ask("GET", STATUS, fields={"Authorization": f"Basic {basic}"}).status == 200
    assert api.ask("GET", STATUS, token=api.keys["alice"]).status == 200
    assert api.ask("GET", STATUS, fields={"Authorization": "Basic nonsense"}).status == 401


def test_logout_ends_a_token(api: Api) -> None:
    token = api.login("victor")
    assert api.ask("GET", STATUS, token=token).status == 200
    assert api.ask("POST", "/api/v1/logout", token=token).status == 200
    assert api.ask("GET", STATUS, token=token).status == 401


def test_health_and_version_need_no_token(api: Api) -> None:
    for base in ("", "/api/v1", "/api/v2"):
        for path in ("health", "health/liveness", "health/readiness"):
            assert api.ask("GET", f"{base}/{path}").status == 200
        assert api.ask("GET", f"{base}/version").json["version"] == __version__
    api.server.call(api.http.drain)
    try:
        got = api.ask("GET", "/api/v1/health/readiness")
        assert (got.status, got.fields["retry-after"]) == (503, "1")
        assert api.ask("GET", "/api/v1/health/liveness").status == 200
    finally:
        api.http.login.ready = True


def test_every_route_is_described_and_every_reference_leads_somewhere(api: Api) -> None:
    got = api.ask("GET", "/openapi.json")
    assert got.status == 200
    document = got.json
    text = got.body.decode()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"] != "Not described", (method, path)
    for name in text.split('"#/components/schemas/')[1:]:
        assert name.partition('"')[0] in document["components"]["schemas"]
    assert "#/components/responses" not in text
    assert (
        "/api/v1/orgs/{org}/experiments/{experiment}/jobs/{job}/inference_microservice/inference" in document["paths"]
    )
    again = api.ask("GET", "/openapi.json", fields={"If-None-Match": got.fields["etag"]})
    assert again.status == 304
    page = api.ask("GET", "/docs")
    assert (page.status, page.fields["content-type"]) == (200, "text/html; charset=utf-8")


def test_v2_answers_as_nvidias_client_expects(api: Api) -> None:
    token = api.login("alice")
    body = {"docker_image": "i", "gpu_type": "g", "num_gpus": 1, "parent_job_id": EXPERIMENT, "workspace": None}
    got = api.ask("POST", f"{V2}:start", body, token)
    assert (got.status, got.json["status"], got.json["job_id"]) == (201, "starting", JOB)
    org, _, experiment, parent, extra = api.jobs.started[-1]
    assert (org, experiment, parent) == (ORG, None, EXPERIMENT)
    assert extra == {"docker_image": "i", "gpu_type": "g", "num_gpus": 1}
    assert api.ask("GET", f"{V2}/{JOB}:status", token=token).json["model_loaded"] is True
    got = api.ask("DELETE", f"{V2}/{JOB}:stop", token=token)
    assert (got.status, got.json["status"]) == (200, "success")
    assert api.ask("GET", f"{V2}/{JOB}:status", token=token).status == 404
    api.jobs.gone = False


def test_a_services_own_report_needs_no_users_token(api: Api) -> None:
    path = f"/api/v1/orgs/{ORG}/experiments/{EXPERIMENT}/jobs/{JOB}:status_update"
    report = {"experiment_number": "0", "status": json.dumps({"status": "AUTO_DELETION_REQUESTED"})}
    assert api.ask("POST", path, report).status == 401
    got = api.ask("POST", path, report, "the-services-own-key")
    assert (got.status, got.json["auto_deletion"]) == (200, True)
    assert api.jobs.updates == [(ORG, EXPERIMENT, JOB, report, "the-services-own-key")]
