# SPDX-License-Identifier: Apache-2.0
"""The driver `kubernetes` on a real API server: both workloads, what clusters refuse, and what is left afterwards."""

from __future__ import annotations

import asyncio
import json
import urllib.request
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from driver_contract import command, hostile
from kubernetes_platform import Platform
from lightkube.resources import apps_v1, batch_v1, core_v1
from lightkube.types import PatchType

from headrace.core.errors import AlreadyExists, FailedPrecondition, HeadraceError, ResourceExhausted, Unavailable
from headrace.platforms.contract import Container, Handle, LaunchSpec, Mount, PlatformStatus
from headrace.platforms.kubernetes import manifests
from headrace.platforms.kubernetes.driver import KubernetesDriver
from headrace.platforms.kubernetes.settings import KubernetesSettings
from support.fake_kubelet import MISSING
from support.ports import free_port
from support.waiting import eventually, eventually_async

pytestmark = pytest.mark.platform
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "kubernetes-services.md"
PATIENCE = 120.0


def spec(program: str = "serve", image: str = "example/service:1", **given: Any) -> LaunchSpec:
    port = free_port()
    box = Container(image, command(program, port=port), port)
    return LaunchSpec(**{"job_id": str(uuid.uuid4()), "container": box, "host_port": port, **given})


async def phase(driver: KubernetesDriver, handle: Handle, wanted: str, reason: str = "") -> PlatformStatus:
    seen: list[PlatformStatus] = []

    async def there() -> bool:
        seen.append(await driver.status(handle))
        return seen[-1].phase == wanted and reason in seen[-1].reason

    await eventually_async(there, within=PATIENCE, message=lambda: seen[-1])
    return seen[-1]


async def answers(driver: KubernetesDriver, handle: Handle) -> Any:
    url = await eventually_async(lambda: driver.endpoint(handle))
    return json.load(await asyncio.to_thread(urllib.request.urlopen, url, timeout=60))


@pytest.fixture(autouse=True)
def _left_as_it_was(cluster: Platform) -> Iterator[None]:
    """Controllers remove what a Service leaves behind a moment later: the next test finds the cluster at rest."""
    before = cluster.server.resources()
    yield
    left_as(cluster, before)


def left_as(cluster: Platform, before: set[str]) -> None:
    eventually(
        lambda: cluster.server.resources() == before,
        within=PATIENCE,
        message=lambda: cluster.server.resources() ^ before,
    )


def run(driver: KubernetesDriver, main: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        try:
            await main()
        finally:
            await driver.close()

    asyncio.run(whole())


SETTINGS = [
    {},
    {"workload": "statefulset", "service_type": "ClusterIP", "ptrace": True},
    {"restricted": True, "service_type": "NodePort", "memory": "2Gi", "cpu": "500m", "shm_size": ""},
    {"workload": "statefulset", "image_pull_secret": "ngc", "service_account": "sa", "node_selector": {"gpu": "h200"}},
    {"liveness_path": "", "readiness_path": ""},
]


@pytest.mark.parametrize("given", SETTINGS)
def test_the_server_accepts_every_manifest_in_a_dry_run(
    cluster: Platform, given: dict[str, Any], tmp_path: Path
) -> None:
    settings = cluster.settings(**given)
    texts = hostile(tmp_path / "canary")
    wanted = spec(
        environment={f"V{number}": text for number, text in enumerate(texts)},
        secret_environment={f"S{number}": text for number, text in enumerate(texts)},
        labels={"org": texts[0], "experiment": "e"},
        gpus=1,
    )
    box = wanted.container
    assert box is not None
    mounted = Container(box.image, "\n".join(texts), box.port, (Mount("/srv/a b", "/in/$(x)"),))
    wanted = LaunchSpec(**{**{name: getattr(wanted, name) for name in wanted.__slots__}, "container": mounted})
    secret = manifests.secret(wanted, settings)
    created = [manifests.workload(wanted, settings, "s1"), manifests.service(wanted, settings), secret]
    before = cluster.server.resources()
    for item in created:
        assert item is not None
        for words in ((), ("--server-side", "--field-manager=headrace")):
            got = cluster.server.kubectl(
                "apply", *words, "--dry-run=server", "-o", "json", "-f", "-", input=yaml.safe_dump(item)
            )
            got = json.loads(got)
            assert contains(
                got, item | {"metadata": {**item["metadata"], "annotations": got["metadata"]["annotations"]}}
            )
    assert cluster.server.resources() == before


def contains(got: Any, wanted: Any) -> bool:
    """All that was wanted is there as it was; the server adds its defaults, and leaves out what is empty."""
    if isinstance(wanted, dict):
        skipped = {"ttlSecondsAfterFinished"}  # an alpha of 1.20
        return all(
            key in skipped or contains(got.get(key), value) for key, value in wanted.items() if value not in ({}, [])
        )
    if isinstance(wanted, list):
        return len(got) == len(wanted) and all(contains(*both) for both in zip(got, wanted, strict=True))
    return bool(got == wanted) or (wanted in ("", False) and got is None)


@pytest.mark.parametrize("workload", ["job", "statefulset"])
def test_three_services_one_killed_and_nothing_is_left(cluster: Platform, workload: str) -> None:
    driver = cluster.driver(workload=workload)
    before = cluster.server.resources()

    async def main() -> None:
        handles = await asyncio.gather(*(driver.start(spec(secret_environment={"HF_TOKEN": "x"})) for _ in range(3)))
        pids = [(await answers(driver, handle))["pid"] for handle in handles]
        assert len(set(pids)) == 3
        result = await driver.list_services()
        assert {result[handle.job_id].pod_phase for handle in handles} == {"Running"}
        for handle in handles:
            assert "serving" in await driver.logs(handle, 10)
        pod = (await driver.status(handles[1])).name
        cluster.kubelet.kill(pod)
        if workload == "job":
            observed = await phase(driver, handles[1], "ended")
            assert (observed.pod_phase, observed.exit_code) == ("Failed", 137) and "signal 9" in observed.reason
            assert await driver.endpoint(handles[1]) is None
        else:  # it is started again

            async def other_pid() -> bool:
                try:
                    return bool((await answers(driver, handles[1]))["pid"] != pids[1])
                except OSError:
                    return False

            await eventually_async(other_pid)
        assert [(await driver.status(handle)).phase for handle in (handles[0], handles[2])] == ["running", "running"]
        await asyncio.gather(*(driver.stop(handle, 2.0) for handle in handles))
        assert await driver.list_services() == {}

    run(driver, main)
    left_as(cluster, before)


def test_service_and_secret_belong_to_the_workload_and_are_deleted_with_it(cluster: Platform) -> None:
    driver = cluster.driver()
    before = cluster.server.resources()

    async def main() -> None:
        handle = await driver.start(spec(secret_environment={"HF_TOKEN": "x"}))
        assert handle.data == {"platform_job_id": f"tao-job-{handle.job_id}", "namespace": "default"}
        client = cluster.server.client
        job = client.get(batch_v1.Job, f"tao-job-{handle.job_id}", namespace="default")
        assert {
            managedfield.manager for managedfield in job.metadata.managedFields if managedfield.operation == "Apply"
        } == {"headrace"}
        for kind, name in (
            (core_v1.Service, f"tao-job-{handle.job_id}"),
            (core_v1.Secret, f"tao-creds-{handle.job_id}"),
        ):
            owners = client.get(kind, name, namespace="default").metadata.ownerReferences
            assert [owner.uid for owner in owners] == [job.metadata.uid]
        # As somebody would who knows nothing of us.
        await asyncio.to_thread(cluster.server.kubectl, "delete", "job", f"tao-job-{handle.job_id}", "--wait=false")

        async def nothing_left() -> bool:
            return await asyncio.to_thread(cluster.server.resources) == before

        await eventually_async(nothing_left)
        assert (await driver.status(handle)).phase == "gone"
        await driver.stop(handle, 1.0)

    run(driver, main)


def test_what_was_orphaned_is_removed_too(cluster: Platform) -> None:
    driver = cluster.driver()
    before = cluster.server.resources()

    async def main() -> None:
        handle = await driver.start(spec(secret_environment={"HF_TOKEN": "x"}))
        await answers(driver, handle)
        await asyncio.to_thread(cluster.server.kubectl, "delete", "job", f"tao-job-{handle.job_id}", "--cascade=orphan")
        await driver.stop(handle, 1.0)
        assert (await driver.status(handle)).phase == "gone"

    run(driver, main)
    left_as(cluster, before)


@pytest.mark.parametrize(
    ("ingress", "expected"),
    [
        ({"ip": "10.1.2.3"}, "http://10.1.2.3:"),
        ({"ip": "fd00::1"}, "http://[fd00::1]:"),
        ({"hostname": "x.elb"}, "http://x.elb:"),
    ],
)
def test_a_load_balancer_has_an_address_or_a_name(cluster: Platform, ingress: dict[str, str], expected: str) -> None:
    driver = cluster.driver()

    async def main() -> None:
        wanted = spec()
        handle = await driver.start(wanted)
        status = {"status": {"loadBalancer": {"ingress": [ingress]}}}
        name = f"tao-job-{handle.job_id}"
        client = cluster.server.client
        client.patch(core_v1.ServiceStatus, name, status, namespace="default", patch_type=PatchType.MERGE)
        assert await driver.endpoint(handle) == f"{expected}{wanted.host_port}"
        await driver.stop(handle, 1.0)

    run(driver, main)


def test_node_ports_and_names_inside_of_the_cluster(cluster: Platform) -> None:
    outside = cluster.driver(service_type="NodePort")
    inside = cluster.driver(service_type="ClusterIP", workload="statefulset")

    async def main() -> None:
        one, other = await outside.start(spec()), await inside.start(spec())
        url = await eventually_async(lambda: outside.endpoint(one))
        service = cluster.server.client.get(core_v1.Service, f"tao-job-{one.job_id}", namespace="default")
        assert url == f"http://127.0.0.1:{service.spec.ports[0].nodePort}"
        url = await eventually_async(lambda: inside.endpoint(other))
        assert url.startswith(f"http://ims-svc-{other.job_id}.default.svc:")
        await outside.stop(one, 1.0)
        await inside.stop(other, 1.0)
        await inside.close()

    run(outside, main)


def test_images_memory_and_crashes_are_reported(cluster: Platform) -> None:
    driver = cluster.driver()
    restarted = cluster.driver(workload="statefulset")

    async def main() -> None:
        missing, hungry = await driver.start(spec(image=MISSING + "x:1")), await driver.start(spec())
        crashing = await restarted.start(spec("fail"))
        observed = await phase(driver, missing, "ended")
        assert observed.pod_phase == "Failed" and "ImagePullBackOff" in observed.reason
        assert await driver.logs(missing, 10) == ""
        await answers(driver, hungry)
        cluster.kubelet.kill((await driver.status(hungry)).name, oom=True)
        observed = await phase(driver, hungry, "ended")
        assert observed.exit_code == 137 and "OOMKilled" in observed.reason
        observed = await phase(restarted, crashing, "ended")
        assert (observed.pod_phase, observed.exit_code) == ("Failed", 3) and "again and again" in observed.reason
        assert "the reason why" in await restarted.logs(crashing, 10)
        for item, handle in ((driver, missing), (driver, hungry), (restarted, crashing)):
            await item.stop(handle, 1.0)
        await restarted.close()

    run(driver, main)


def test_gpus_that_no_node_has(cluster: Platform) -> None:
    driver = cluster.driver()
    careless = cluster.driver(check_gpus=False)
    before = cluster.server.resources()

    async def main() -> None:
        with pytest.raises(ResourceExhausted, match="largest node of the cluster has 2"):
            await driver.start(spec(gpus=3))
        assert cluster.server.resources() == before
        handle = await careless.start(spec(gpus=3))
        observed = await phase(careless, handle, "starting", "Insufficient nvidia.com/gpu")
        assert observed.pod_phase == "Pending" and await careless.endpoint(handle) is None
        await careless.stop(handle, 1.0)
        await careless.close()

    run(driver, main)


def test_denied_rights_and_quotas_are_reported(cluster: Platform) -> None:
    server = cluster.server
    driver = cluster.driver(namespace="tight")

    async def main() -> None:
        with pytest.raises(FailedPrecondition, match="no such namespace"):
            await driver.start(spec())
        assert [check.name for check in await driver.preflight() if not check.passed] == ["namespace"]
        server.kubectl("create", "namespace", "tight")
        quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q", "namespace": "tight"}}
        server.kubectl("apply", "-f", "-", input=json.dumps({**quota, "spec": {"hard": {"services": "0"}}}))
        # No controller counts here; the admission goes by the status.
        hard = {"status": {"hard": {"services": "0"}, "used": {"services": "0"}}}
        server.client.patch(core_v1.ResourceQuotaStatus, "q", hard, namespace="tight", patch_type=PatchType.MERGE)

        async def refused() -> bool:
            try:
                handle = await driver.start(spec())
            except ResourceExhausted as error:
                return "quota" in error.message
            await driver.stop(handle, 1.0)
            return False  # the admission reads its quotas from a cache

        await eventually_async(refused)

        async def empty() -> bool:
            return await driver.list_services() == {}

        await eventually_async(empty)
        server.kubectl("delete", "quota", "q", "-n", "tight")
        hard = {"status": {"hard": {"pods": "0"}, "used": {"pods": "0"}}}
        server.kubectl("apply", "-f", "-", input=json.dumps({**quota, "spec": {"hard": {"pods": "0"}}}))
        server.client.patch(core_v1.ResourceQuotaStatus, "q", hard, namespace="tight", patch_type=PatchType.MERGE)

        async def without_a_pod() -> bool:
            handle = await driver.start(spec())
            await asyncio.sleep(0.5)
            observed = await driver.status(handle)
            await driver.stop(handle, 1.0)
            return observed.phase == "starting" and "exceeded quota" in observed.reason

        await eventually_async(without_a_pod)

    run(driver, main)
    server.kubectl("delete", "namespace", "tight")


def test_a_user_needs_no_more_than_the_guides_role(cluster: Platform) -> None:
    server = cluster.server
    driver = cluster.driver(kubeconfig=str(server.kubeconfig_of_nobody()))

    async def main() -> None:
        handle = Handle(str(uuid.uuid4()), "kubernetes")
        for call in (driver.start(spec()), driver.status(handle), driver.list_services(), driver.stop(handle, 1.0)):
            with pytest.raises(FailedPrecondition, match=r"nobody.* cannot .*role in the guide"):
                await call
        rights = next(check for check in await driver.preflight() if check.name == "rights")
        assert not rights.passed and "create jobs" in rights.message and "get pods/log" in rights.message
        role = GUIDE.read_text().split("```yaml\n")[1].split("```")[0]
        server.kubectl("apply", "-f", "-", input=role)
        server.kubectl("create", "rolebinding", "nobody", "--role=headrace-launcher", "--user=nobody")

        async def allowed() -> bool:
            return all(check.passed for check in await driver.preflight())

        await eventually_async(allowed)
        handle = await driver.start(spec(secret_environment={"HF_TOKEN": "x"}, gpus=1))
        await answers(driver, handle)
        assert "serving" in await driver.logs(handle, 5) and handle.job_id in await driver.list_services()
        await driver.stop(handle, 1.0)
        assert (await driver.status(handle)).phase == "gone"

    run(driver, main)
    server.kubectl("delete", "rolebinding/nobody", "role/headrace-launcher")


def test_other_clients_are_refused_and_a_missing_server_is_reported(cluster: Platform, tmp_path: Path) -> None:
    text = cluster.server.kubeconfig.read_text()
    stranger, elsewhere, broken = (tmp_path / name for name in ("stranger", "elsewhere", "broken"))
    stranger.write_text(text.replace("admintoken", "x"))
    port = text.split("127.0.0.1:")[1].split('"')[0]
    elsewhere.write_text(text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{free_port()}"))
    broken.write_text("clusters: [")
    expected: list[tuple[KubernetesSettings, type[HeadraceError], str]] = [
        (cluster.settings(kubeconfig=str(stranger)), FailedPrecondition, "log in"),
        (cluster.settings(kubeconfig=str(elsewhere)), Unavailable, "does not answer"),
        (cluster.settings(kubeconfig=str(broken)), FailedPrecondition, "cannot be used"),
        (cluster.settings(kubeconfig=str(tmp_path / "none")), FailedPrecondition, "no kubeconfig"),
        (cluster.settings(context="other"), FailedPrecondition, "context 'other'"),
    ]
    for settings, kind, told in expected:
        driver = KubernetesDriver(settings)

        async def main(driver: KubernetesDriver = driver, kind: type[HeadraceError] = kind, told: str = told) -> None:
            with pytest.raises(kind, match=told):
                await driver.start(spec())
            with pytest.raises(kind, match=told):
                await driver.list_services()
            failed = [check for check in await driver.preflight() if not check.passed]
            assert len(failed) == 1 and told in failed[0].message
            assert driver.place.startswith("kubernetes:")

        run(driver, main)


def test_a_pod_that_does_not_end_is_reported_and_stopping_again_is_fine(cluster: Platform) -> None:
    driver, patient = cluster.driver(delete_seconds=1.0), cluster.driver()
    before = cluster.server.resources()

    async def main() -> None:
        handle = await driver.start(spec(secret_environment={"HF_TOKEN": "x"}))
        await answers(driver, handle)
        pod = (await driver.status(handle)).name

        def hold(finalizers: list[str]) -> None:
            patch = {"metadata": {"finalizers": finalizers}}
            cluster.server.client.patch(core_v1.Pod, pod, patch, namespace="default", patch_type=PatchType.MERGE)

        hold(["example.org/held"])
        with pytest.raises(Unavailable, match=f"Pod {pod} .*are not deleted"):
            await driver.stop(handle, 1.0)
        assert (await driver.status(handle)).pod_phase == "Terminating"
        assert handle.job_id in await driver.list_services()
        with pytest.raises(AlreadyExists, match="still being removed"):
            await driver.start(spec(job_id=handle.job_id))
        hold([])
        # By one with patience: how long the rest takes is the machine's business.
        await patient.stop(handle, 1.0)
        assert (await patient.status(handle)).phase == "gone"
        await patient.close()

    run(driver, main)
    left_as(cluster, before)


def test_a_pull_secret_must_be_there_and_be_one(cluster: Platform) -> None:
    driver = cluster.driver(image_pull_secret="ngc")

    async def check() -> tuple[bool, str]:
        return next(
            (check.passed, check.message) for check in await driver.preflight() if check.name == "image pull secret"
        )

    async def main() -> None:
        assert await check() == (False, "ngc does not exist: `kubectl create secret docker-registry` creates it")
        cluster.server.kubectl("create", "secret", "generic", "ngc", "--from-literal=a=b")
        assert await check() == (False, "ngc is not a secret of type docker-registry")
        cluster.server.kubectl("delete", "secret", "ngc")
        arguments = ("--docker-server=nvcr.io", "--docker-username=$oauthtoken", "--docker-password=x")
        cluster.server.kubectl("create", "secret", "docker-registry", "ngc", *arguments)
        assert (await check())[0]

    run(driver, main)
    cluster.server.kubectl("delete", "secret", "ngc")


def test_a_second_start_changes_nothing_of_a_stateful_set(cluster: Platform) -> None:
    driver = cluster.driver(workload="statefulset")

    async def main() -> None:
        wanted = spec()
        handle = await driver.start(wanted)
        name = f"ims-{handle.job_id}"
        before = cluster.server.client.get(apps_v1.StatefulSet, name, namespace="default")
        with pytest.raises(AlreadyExists):
            await driver.start(LaunchSpec(wanted.job_id, container=wanted.container, environment={"OTHER": "1"}))
        after = cluster.server.client.get(apps_v1.StatefulSet, name, namespace="default")
        assert (after.metadata.uid, after.metadata.generation) == (before.metadata.uid, before.metadata.generation)
        await driver.stop(handle, 1.0)

    run(driver, main)
