# SPDX-License-Identifier: Apache-2.0
"""Services on platforms that run images: what they are started with, what nobody may see, and whose are left alone."""

from __future__ import annotations

import json
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from jobs_tools import FakeDriver, JobSpec, opened, run, started, trained
from store_stub import ACCESS, SECRET, StoreStub

from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.jobs.records import ExperimentSpec, Job, WorkspaceSpec
from headrace.jobs.service import JobService
from headrace.jobs.settings import ContainerSettings
from headrace.platforms.contract import LaunchSpec, Mount, check_spec
from headrace.platforms.process import ProcessDriver
from headrace.version import __version__

HUB = "hf_a_token_of_a_user"
HOSTILE = 'it\'s "quoted" $(touch canary) `touch canary` $HOME;\n&& touch canary'


async def spec_of(
    folder: Path, containers: ContainerSettings, callback: str = "", arch: str = "cosmos-rl", **extra: Any
) -> tuple[LaunchSpec, Job]:
    driver = FakeDriver()
    async with opened(folder, driver, containers=containers, callback_url=callback) as service:
        parent = await trained(service, folder)
        job = await started(service, parent, network_arch=arch, **extra)
        spec = driver.running[job.id]
        check_spec(spec)
        return spec, job


def test_our_own_image(tmp_path: Path) -> None:
    async def main() -> None:
        extra: dict[str, Any] = {"docker_env_vars": {"HF_TOKEN": HUB, "CLOUD_BASED": "maybe"}, "note": HOSTILE}
        spec, job = await spec_of(tmp_path, ContainerSettings("kubernetes"), "http://gateway:8090", num_gpus=2, **extra)
        box = spec.container
        assert box is not None and (box.image, box.port) == (f"headrace:{__version__}", 8080)
        assert box.command == (
            f"umask 0 && exec headrace microservice start --job-id {job.id} --host 0.0.0.0 --port 8080 "
            "--grace-seconds 30 --idle-timeout-minutes 30"
        )
        model = str(tmp_path / "trained")
        assert box.mounts == (Mount(model, model),)
        assert (spec.argv, spec.secrets, spec.target, spec.gpus) == ((), {}, "", 2)
        assert spec.environment == {
            "TAO_EXECUTION_BACKEND": "local-k8s",
            "TAO_API_JOB_ID": job.id,
            "CLOUD_BASED": "False",
        }
        assert spec.labels == {"org": "org", "experiment": job.experiment_id, "job": job.id}
        secret = dict(spec.secret_environment)
        document = json.loads(secret.pop("HEADRACE_JOB"))
        assert (document["job_id"], document["neural_network_name"]) == (job.id, "cosmos-rl")
        assert (document["specs"]["model_path"], document["specs"]["note"]) == (model, HOSTILE)
        assert secret.pop("TAO_ADMIN_KEY")
        assert secret == {
            "HF_TOKEN": HUB,
            "TAO_LOGGING_SERVER_URL": f"http://gateway:8090/api/v1/orgs/org/experiments/{job.experiment_id}/jobs/{job.id}",
        }

    run(main())


def test_a_container_without_callback_does_not_request_its_stop(tmp_path: Path) -> None:
    async def main() -> None:
        spec, _ = await spec_of(tmp_path, ContainerSettings("local-docker", gpus=False))
        assert spec.container is not None and spec.container.command.endswith("--disable_auto_deletion")
        assert set(spec.secret_environment) == {"HEADRACE_JOB"} and spec.gpus == 0

    run(main())


def test_taos_program_gets_the_job_from_its_shell(tmp_path: Path) -> None:
    """The line is run by a real shell, with a program that shows its words in the place of TAO's."""

    async def main() -> tuple[LaunchSpec, Job]:
        environ = {"IMAGE_COSMOS_RL": "registry.example/cosmos:1", "HEADRACE_IMAGE": "ours:1"}
        return await spec_of(tmp_path, ContainerSettings("local-docker", "tao", environ), "http://g:1", note=HOSTILE)

    spec, job = run(main())
    box = spec.container
    assert box.image == "registry.example/cosmos:1"
    assert box.command.startswith("umask 0 && ") and HOSTILE not in box.command and "TAO_ADMIN_KEY" not in box.command
    name = box.command.split()[3]
    program = tmp_path / "bin" / name
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    environ = {"PATH": f"{program.parent}:/usr/bin:/bin", **spec.environment, **spec.secret_environment}
    result = subprocess.run(["/bin/sh", "-c", box.command], env=environ, capture_output=True, cwd=tmp_path, check=True)
    words = result.stdout.decode().split("\0")[:-1]
    sent = json.loads(words[words.index("--job") + 1])
    assert (sent["job_id"], sent["specs"]["note"]) == (job.id, HOSTILE)
    shown = json.loads(words[words.index("--docker_env_vars") + 1])
    assert shown == spec.environment and shown["TAO_EXECUTION_BACKEND"] == "local-docker"
    assert not (tmp_path / "canary").exists()


def test_an_image_of_ones_own_has_our_program_or_taos(tmp_path: Path) -> None:
    async def main() -> None:
        spec, _ = await spec_of(tmp_path, ContainerSettings("local-docker", "registry.example/team/headrace:2"))
        assert spec.container is not None and " headrace microservice " in spec.container.command
        spec, _ = await spec_of(tmp_path, ContainerSettings("local-docker", "registry.example/vendor:2"))
        assert spec.container is not None and '--job "$HEADRACE_JOB"' in spec.container.command
        # Flags have no room for what a job says of its buckets, and its path is checked before anything is started.
        spec, _ = await spec_of(
            tmp_path, ContainerSettings("local-docker", "registry.example/vendor:2"), arch="cosmos-predict2.5"
        )
        assert spec.container is not None and f"--checkpoint-path {tmp_path}/trained" in spec.container.command
        assert "HEADRACE_JOB" not in spec.secret_environment

    run(main())


def test_an_architecture_without_a_program_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        driver = FakeDriver()
        async with opened(tmp_path, driver, containers=ContainerSettings("kubernetes", "tao")) as service:
            parent = await trained(service, tmp_path)
            with pytest.raises(InvalidArgument, match="unknown architecture 'classification_pyt'"):
                await started(service, parent)
            assert not driver.running
            (job,) = [newest_job for newest_job in await service.newest_jobs(5) if newest_job.is_service]
            assert job.status == "Error" and "could not be launched" in job.reason

    run(main())


def test_slurm_without_a_container(tmp_path: Path) -> None:
    async def main() -> None:
        spec, job = await spec_of(tmp_path, ContainerSettings("slurm", bare=True))
        box = spec.container
        assert box is not None and (box.image, box.mounts) == ("", ())
        assert 20_000 <= box.port <= 31_999 and f"--port {box.port} " in box.command
        # By its id, so that two in twelve thousand have the same one: not all three.
        others = [(await spec_of(tmp_path, ContainerSettings("slurm", bare=True)))[0].container for _ in range(2)]
        assert {other.port for other in others if other is not None} != {box.port}
        assert spec.environment["TAO_EXECUTION_BACKEND"] == "slurm"

    run(main())


def test_credentials_of_a_bucket_are_in_no_line(tmp_path: Path) -> None:
    async def main(store: StoreStub) -> None:
        driver = FakeDriver()
        async with opened(tmp_path, driver, containers=ContainerSettings("kubernetes")) as service:
            details = {"cloud_region": "us-west-1", "cloud_bucket_name": "bkt", "endpoint_url": store.url("")}
            details |= {"access_key": ACCESS, "secret_key": SECRET}
            workspace, _ = await service.create_workspace("org", "user", WorkspaceSpec("mine", "aws", details))
            created = await service.create_experiment(
                "org", "user", ExperimentSpec("cosmos-rl", workspace=workspace.id)
            )
            job = await service.start("org", "user", created.id, None, {"hf_model": "acme/tiny"})
            spec = driver.running[job.id]
            assert spec.container is not None and spec.container.mounts == ()
            shown = json.dumps([spec.container.command, *spec.environment.values(), *spec.labels.values()])
            assert SECRET not in shown and SECRET not in repr(spec)
            document = json.loads(spec.secret_environment["HEADRACE_JOB"])
            assert SECRET in json.dumps(document["cloud_metadata"]) and spec.environment["CLOUD_BASED"] == "True"

    with StoreStub({"bkt": {}}) as store:
        run(main(store))


async def _with_a_stranger(service: JobService, driver: FakeDriver, folder: Path) -> Job:
    job = await started(service, await trained(service, folder))
    stranger = "0f0e0d0c-0b0a-4908-8706-050403020100"
    driver.running[stranger] = LaunchSpec(stranger)
    await service.reconcile()
    return job


def test_foreign_services_on_the_same_platform_are_not_touched(tmp_path: Path) -> None:
    async def main() -> None:
        driver = FakeDriver()
        async with opened(tmp_path, driver, containers=ContainerSettings("kubernetes")) as service:
            job = await _with_a_stranger(service, driver, tmp_path)
            assert len(driver.running) == 2
            spec = driver.running[job.id]
            await service.stop("org", "user", None, job.id)
            assert job.id not in driver.running
            # What comes back of one that was ours, and is to be over, is ended.
            driver.running[job.id] = spec
            await service.reconcile()
            assert job.id not in driver.running and len(driver.running) == 1

    run(main())


def test_batches_stay_processes_of_this_machine(tmp_path: Path) -> None:
    async def main() -> None:
        driver = FakeDriver()
        async with opened(tmp_path, driver, containers=ContainerSettings("kubernetes")) as service:
            assert isinstance(service.batches.driver, ProcessDriver)
            parent = await trained(service, tmp_path)
            files = service.services._settings.files_folder("org")
            files.mkdir(parents=True)
            (files / "in.jsonl").write_text('{"x": 1}\n')
            specs = {"input": "in.jsonl", "output": "out.jsonl"}
            job = await service.create_batch(
                "org", "user", parent.experiment_id, JobSpec("inference", parent.id, specs=specs)
            )
            assert job.place == service.batches.driver.place != driver.place
            await service.cancel_job("org", "user", job.id)
            await service.reconcile()
            assert job.id not in driver.running

    run(main())


def test_a_platform_that_is_not_there(tmp_path: Path) -> None:
    async def main() -> None:
        driver = FakeDriver()
        driver.fail_start = FailedPrecondition("no docker here")
        async with opened(tmp_path, driver, containers=ContainerSettings("local-docker")) as service:
            parent = await trained(service, tmp_path)
            with pytest.raises(FailedPrecondition, match="no docker here"):
                await started(service, parent)

    run(main())
