# SPDX-License-Identifier: Apache-2.0
"""Bodies, states and troubles of the Lepton driver, where needed against FakeLepton."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driver_contract import hostile
from fake_lepton import FakeLepton

from headrace.core.errors import (
    FailedPrecondition,
    HeadraceError,
    InvalidArgument,
    Unauthenticated,
    Unavailable,
)
from headrace.platforms.contract import Check, Container, Handle, LaunchSpec, Mount, PlatformStatus
from headrace.platforms.lepton import deployments
from headrace.platforms.lepton.driver import LeptonDriver
from headrace.platforms.lepton.settings import LeptonSettings

JOB = "0123abcd-4567-89ab-cdef-0123456789ab"
BOX = Container("nvcr.io/nvidia/tao/tao-toolkit:7.0.1", "umask 0 && sleep 600")


def settings(**more: Any) -> LeptonSettings:
    return LeptonSettings(**{"workspace": "ws", "token": "lepton-token", "poll_seconds": 0.02, **more})


@pytest.fixture
def fake() -> Iterator[FakeLepton]:
    with FakeLepton() as fake:
        yield fake


def test_names_have_36_characters_and_can_be_read_back() -> None:
    name = deployments.deployment_name(JOB)
    assert (len(name), name[0], deployments.job_of_deployment(name)) == (36, "t", JOB)
    assert deployments.job_of_secret(deployments.secret_name(JOB, "HF_TOKEN")) == JOB
    for other in ("", "tao-", "tao-job-1", "headrace", name + "0", name.upper()):
        assert deployments.job_of_deployment(other) is None and deployments.job_of_secret(other) is None


def test_a_body_has_the_values_and_no_secret(tmp_path: Path) -> None:
    texts = hostile(tmp_path / "canary")
    plain = {f"V{number}": text for number, text in enumerate(texts)}
    spec = LaunchSpec(JOB, container=BOX, environment=plain, secret_environment={"HF_TOKEN": "hf_x"}, gpus=4)
    chosen = settings(
        resource_shape="gpu.8xh100-sxm",
        dedicated_node_group="nodes",
        image_pull_secret="ngc",
        endpoint_token="callers",
    )
    body = json.loads(json.dumps(deployments.deployment_body(spec, chosen)))
    assert "hf_x" not in json.dumps(body)
    assert body["spec"]["container"]["command"] == ["/bin/bash", "-c", BOX.command]
    variables = {env["name"]: env for env in body["spec"]["envs"]}
    assert {name: variables[name]["value"] for name in plain} == plain
    assert variables["HF_TOKEN"]["value_from"] == {"secret_name_ref": deployments.secret_name(JOB, "HF_TOKEN")}
    assert deployments.secret_bodies(spec)[0]["value"] == "hf_x"
    wanted = body["spec"]["resource_requirement"]
    assert (wanted["resource_shape"], wanted["min_replicas"], wanted["max_replicas"]) == ("gpu.8xh100-sxm", 1, 1)
    assert wanted["affinity"] == {"allowed_dedicated_node_groups": ["nodes"]}
    assert body["spec"]["api_tokens"] == [{"value": "callers"}]
    public = deployments.deployment_body(spec, settings(resource_shape="gpu.8xh100-sxm", public=True))["spec"]
    assert (public["api_tokens"], public["allow_unauthenticated_access"]) == ([], True)


@pytest.mark.parametrize(
    ("spec", "more", "told"),
    [
        (LaunchSpec(JOB), {}, "containers"),
        (LaunchSpec(JOB, container=BOX, gpus=1), {}, "resource_shape"),
        (LaunchSpec(JOB, container=BOX, gpus=2), {"resource_shape": "gpu.a10"}, "fewer"),
        (LaunchSpec(JOB, container=BOX, gpus=1), {"resource_shape": "cpu.large"}, "fewer"),
        (LaunchSpec(JOB, container=Container("i", "c", mounts=(Mount("/a", "/b"),))), {}, "storage"),
    ],
)
def test_what_has_no_place_is_refused(spec: LaunchSpec, more: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        deployments.deployment_body(spec, settings(**more))


@pytest.mark.parametrize(
    ("status", "phase", "word"),
    [
        ({"state": "Ready"}, "running", "Running"),
        ({"state": "Starting"}, "starting", "Pending"),
        ({"state": "Updating"}, "starting", "Pending"),
        ({"state": "Scaling"}, "starting", "Pending"),
        ({"state": "Not Ready"}, "starting", "Pending"),
        ({"state": "Not Ready", "phase": "Stopped"}, "ended", "Succeeded"),
        ({"state": "Stopping"}, "ended", "Succeeded"),
        ({"state": "Deleting"}, "ended", "Terminating"),
        ({"state": "Error"}, "ended", "Failed"),
        ({"state": "UNK"}, "starting", "Unknown"),
        ({"state": "of next year"}, "starting", "Unknown"),
        ({}, "starting", "Unknown"),
    ],
)
def test_states(status: dict[str, str], phase: str, word: str) -> None:
    observed = deployments.deployment_status({"metadata": {"id": "x"}, "status": status})
    assert (observed.phase, observed.pod_phase, observed.name) == (phase, word, "x")


def test_the_last_termination_decides_how_it_ended() -> None:
    document = {
        "r-1": [{"finished_at": 5, "exit_code": 0}, {"finished_at": 9, "exit_code": 137, "reason": "OOMKilled"}]
    }
    observed = deployments.deployment_status({"status": {"state": "Not Ready"}}, document)
    assert (observed.phase, observed.exit_code) == ("ended", 137) and "OOMKilled" in observed.reason
    assert deployments.deployment_status({"status": {"state": "Ready"}}, document).phase == "running"


def test_lines_are_in_order() -> None:
    streams = [{"values": [["3", "c"], ["1", "a"]]}, {"values": [["2", "b"]]}]
    assert deployments.log_lines({"data": {"result": streams}}, 2) == "b\nc"
    for nothing in (None, {}, {"data": None}, {"data": {"result": None}}):
        assert deployments.log_lines(nothing, 5) == ""


def preflight(chosen: LeptonSettings) -> dict[str, Check]:
    return {check.name: check for check in asyncio.run(LeptonDriver(chosen).preflight())}


def test_preflight_reports_what_is_missing_and_no_value(fake: FakeLepton) -> None:
    unset = preflight(LeptonSettings.from_environment({}))
    assert not unset["LEPTON_WORKSPACE_ID"].passed and unset["LEPTON_WORKSPACE_ID"].message.startswith("UNSET")
    assert not unset["LEPTON_AUTH_TOKEN"].passed and fake.calls == []
    environ = {"LEPTON_WORKSPACE_ID": "ws", "LEPTON_AUTH_TOKEN": "lepton-token"}
    fine = preflight(
        LeptonSettings.from_environment(environ, gateway=fake.url, image_pull_secret="tao-image-pull-secret")
    )
    assert all(check.passed for check in fine.values()) and "lepton-token" not in str(fine)
    assert "lepton-token" not in repr(LeptonSettings.from_environment(environ))
    wrong = preflight(settings(gateway=fake.url, token="old"))
    assert not wrong["workspace"].passed and "LEPTON_AUTH_TOKEN" in wrong["workspace"].message
    unknown = preflight(settings(gateway=fake.url, workspace="../x"))
    assert not unknown["workspace"].passed and "../x" in unknown["workspace"].message
    missing = preflight(settings(gateway=fake.url, image_pull_secret="none"))
    assert not missing["image pull secret"].passed
    assert "does not answer" in preflight(settings(gateway="http://127.0.0.1:1"))["workspace"].message


def test_problems_are_reported_by_kind(fake: FakeLepton) -> None:
    async def list_error(chosen: LeptonSettings) -> HeadraceError:
        with pytest.raises(HeadraceError) as caught:
            await LeptonDriver(chosen).list_services()
        return caught.value

    async def main() -> None:
        assert isinstance(await list_error(settings(gateway=fake.url, token="")), FailedPrecondition)
        assert isinstance(await list_error(settings(gateway=fake.url, workspace="")), FailedPrecondition)
        assert isinstance(await list_error(settings(gateway=fake.url, token="old")), Unauthenticated)
        assert isinstance(await list_error(settings(gateway=fake.url, workspace="other")), FailedPrecondition)
        fake.broken = 1
        assert isinstance(await list_error(settings(gateway=fake.url)), Unavailable)
        # An unknown workspace must not read as a service that is gone: somebody would prune it.
        with pytest.raises(FailedPrecondition):
            await LeptonDriver(settings(gateway=fake.url, workspace="other")).status(Handle(JOB, "lepton"))

    asyncio.run(main())


def test_a_refused_service_leaves_no_secret_and_a_partial_start_is_reported(fake: FakeLepton) -> None:
    async def main() -> None:
        driver = LeptonDriver(settings(gateway=fake.url))
        refused = LaunchSpec(JOB, container=Container("No Image", "x"), secret_environment={"HF_TOKEN": "hf_x"})
        with pytest.raises(InvalidArgument, match="no image has this name"):
            await driver.start(refused)
        assert fake.resources() == set()
        fake.secrets[deployments.secret_name(JOB, "HF_TOKEN")] = "hf_x"
        fake.secrets["SOMEBODY_ELSES"] = "1"
        assert (await driver.list_services())[JOB] == await driver.status(Handle(JOB, "lepton"))
        assert "never started" in (await driver.status(Handle(JOB, "lepton"))).reason
        await driver.stop(Handle(JOB, "lepton"), 1)
        assert fake.resources() == {"secret SOMEBODY_ELSES"} and await driver.list_services() == {}

    asyncio.run(main())


def test_an_image_that_cannot_be_pulled_is_reported(fake: FakeLepton) -> None:
    async def main() -> None:
        driver = LeptonDriver(settings(gateway=fake.url))
        job_id = str(uuid.uuid4())
        handle = await driver.start(LaunchSpec(job_id, container=Container("no-such/image:1", "x")))
        assert handle.data["platform_job_id"] == deployments.deployment_name(job_id)
        wanted = PlatformStatus(
            "starting", deployments.deployment_name(job_id), "Pending", reason="ConfigError: ImagePullBackOff"
        )
        assert await driver.status(handle) == wanted
        await driver.stop(handle, 1)
        assert fake.resources() == set()

    asyncio.run(main())


def test_an_invalid_gateway_address_is_refused() -> None:
    for bad in ("", "ftp://x", "gateway"):
        with pytest.raises(InvalidArgument):
            LeptonDriver(settings(gateway=bad))
