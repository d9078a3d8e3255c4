# SPDX-License-Identifier: Apache-2.0
"""What the console asks of the gateway beside the job API: who one is, and what was done."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from job_api import ORG, Api, StandInJobs, job_api

SESSION, AUDIT = f"/api/v2/orgs/{ORG}/session", f"/api/v2/orgs/{ORG}/audit"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with job_api(StandInJobs(), tmp_path_factory.mktemp("insight")) as made:
        yield made


@pytest.mark.parametrize(("who", "role"), [("victor", "viewer"), ("alice", "operator"), ("root", "admin")])
def test_a_session_shows_its_user_and_rights(api: Api, who: str, role: str) -> None:
    token = api.login(who)
    reported = api.ask("GET", SESSION, token=token).json
    assert (reported["user_name"], reported["organisation"], reported["role"]) == (who, ORG, role)
    assert ("services.stop" in reported["may"]) is (role != "viewer")
    assert ("audit.read" in reported["may"]) is (role == "admin")
    assert token not in str(reported)


def test_admins_read_what_was_done_in_their_organisation(api: Api) -> None:
    api.ask("POST", f"/api/v2/orgs/{ORG}/inference_microservices:start", {"hf_model": "a/b"}, api.login("alice"))
    api.login("bob", "other")
    got = api.ask("GET", f"{AUDIT}?size=50", token=api.login("root"))
    events = got.json["events"]
    assert {event["organisation"] for event in events} == {ORG}
    assert [event["user"] for event in events if event["operation"] == "services.start"] == ["alice"]
    assert [event["time"] for event in events] == sorted((event["time"] for event in events), reverse=True)
    assert len(api.ask("GET", f"{AUDIT}?size=1", token=api.login("root")).json["events"]) == 1
    assert api.ask("GET", f"{AUDIT}?size=x", token=api.login("root")).status == 400


@pytest.mark.parametrize("who", ["victor", "alice"])
def test_others_do_not(api: Api, who: str) -> None:
    assert api.ask("GET", AUDIT, token=api.login(who)).status == 403
