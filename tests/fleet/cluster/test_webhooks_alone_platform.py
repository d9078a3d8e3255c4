# SPDX-License-Identifier: Apache-2.0
"""Webhooks that come, go and change their certificates while the API server asks. Each test has operators of its own."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.platform, pytest.mark.timeout(900)]

SAMPLES = sorted(each.stem for each in (Path(__file__).parents[3] / "headrace/fleet/samples").glob("*.yaml"))


def service(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "ome.io/v1beta1", "kind": "InferenceService", "metadata": {"name": name}, "spec": spec}


RUNNER = {"runner": {"name": "ome-container", "image": "i:1"}}


@pytest.fixture(scope="module")
def place(site: Any) -> Iterator[Any]:
    """The cluster with the operator's namespace; nothing of ours is left behind in it."""
    from webhook_site import NAMESPACE, forget

    site.server.kubectl("create", "namespace", NAMESPACE, check=False)
    forget(site)
    yield site
    forget(site)


def test_authorities_rotate_under_reviews(place: Any) -> None:
    """With Fail, so that a single handshake that fails would show. All of it is replaced every few seconds."""
    from webhook_site import CONFIGURATIONS, Operator, answers, forget, free_port, ready, webhooks_at

    from headrace.fleet.cluster.webhooks.settings import Lifetimes

    forget(place)
    hour = timedelta(hours=1)
    quick = Lifetimes(hour, hour - timedelta(seconds=3), hour / 2, hour / 2 - timedelta(seconds=1))
    # A look is how long the API server has to hear of an authority before a certificate of it is used.
    settings = webhooks_at(free_port(), failure_policy="Fail", lifetimes=quick, refresh_seconds=1.0)
    with Operator(place.server.kubeconfig, settings) as running:
        ready(place)
        seen, asked, kept, limit = set(), 0, 0, time.monotonic() + 120
        while len(seen) < 4 or asked <= 20 or kept <= 4:
            assert time.monotonic() < limit, f"{asked} questions, {len(seen)} bundles, {kept} times kept"
            assert answers(place), f"after {asked} questions, {len(seen)} bundles"
            asked += 1
            seen.add(place.fetch(CONFIGURATIONS[1])["webhooks"][0]["clientConfig"]["caBundle"])
            kept = sum(each.startswith("PUT") and "/secrets/" in each for each in running.writes)
    forget(place)  # Fail, and nobody there


def test_a_stopped_operator_blocks_no_request(place: Any, clean: Any) -> None:
    from webhook_site import Operator, free_port, ready, registered, webhooks_at

    with Operator(place.server.kubeconfig, webhooks_at(free_port())) as running:
        ready(place)
        running.stop()
        assert registered(place)
        bad = service("late", {"engine": {**RUNNER, "minReplicas": 5, "maxReplicas": 2}})
        clean.apply(bad)
        clean.server.kubectl("annotate", "isvc", "late", "a=b")
        assert "minReplicas" in clean.service("late")["spec"]["engine"]
        clean.server.kubectl("delete", "isvc", "late")
        assert clean.service("late") is None
        clean.apply(bad)
    with Operator(place.server.kubeconfig, webhooks_at(free_port())):
        from controller_site import until

        ready(place)
        # The second line: a condition says what the webhook would have.
        until(lambda: "minReplicas" in clean.ready("late").get("message", ""))
        clean.server.kubectl("label", "isvc", "late", "team=a")  # wrong before, and not for this edit


def test_a_replica_that_does_not_lead_answers_too(place: Any) -> None:
    """Both have the certificate; one has registered. The other is asked as the Service would."""
    import httpx2
    from controller_site import until
    from webhook_site import NAMESPACE, Operator, forget, free_port, ready, webhooks_at

    forget(place)
    first, second = free_port(), free_port()
    with Operator(place.server.kubeconfig, webhooks_at(first), elect=True) as leader:
        ready(place)
        with Operator(place.server.kubeconfig, webhooks_at(second), elect=True) as waiting:
            review = {
                "apiVersion": "admission.k8s.io/v1",
                "request": {
                    "uid": "1",
                    "operation": "CREATE",
                    "namespace": "default",
                    "object": service("x", {"model": {"name": "nobody"}, "engine": {}}),
                },
            }
            secret = place.fetch(f"/api/v1/namespaces/{NAMESPACE}/secrets/headrace-webhook-certificate")
            import ssl

            context = ssl.create_default_context(cadata=base64.b64decode(secret["data"]["ca.crt"]).decode())
            with httpx2.Client(verify=context, timeout=60) as client:

                def warned() -> bool:
                    url = f"https://127.0.0.1:{second}/validate-ome-io-v1beta1-inferenceservice"
                    try:
                        told = client.post(url, json=review).json()["response"]
                    except httpx2.TransportError:
                        return False
                    return "there is no model nobody" in " ".join(told.get("warnings", []))

                until(warned)
            assert waiting.writes == [], "the certificate is the first one's"
            leader.stop()
            ready(place)
            until(lambda: waiting.writes)  # it leads, and registers its own address
            place.server.kubectl("delete", "lease", "-n", NAMESPACE, "headrace-operator", check=False)
            waiting.quiet()
            ready(place)


def test_it_needs_no_more_rights_than_its_manifests_give(place: Any) -> None:
    """As nobody with these rights. The configurations go with the ClusterRole that owns them."""
    from controller_site import until
    from webhook_site import CONFIGURATIONS, forget, free_port

    forget(place)
    names = ["mutatingwebhookconfigurations", "validatingwebhookconfigurations"]
    rules = [
        {
            "apiGroups": ["admissionregistration.k8s.io"],
            "resources": names,
            "resourceNames": ["headrace-operator"],
            "verbs": ["get", "create", "patch"],
        },
        {
            "apiGroups": ["rbac.authorization.k8s.io"],
            "resources": ["clusterroles"],
            "resourceNames": ["headrace-operator-webhook"],
            "verbs": ["get"],
        },
    ]
    secret = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get", "update"]}
    secret["resourceNames"] = ["headrace-webhook-certificate"]
    subject = [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "nobody"}]
    api, cluster, own = "rbac.authorization.k8s.io/v1", {"name": "hooks"}, {"name": "hooks", "namespace": "hooks"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "name": "hooks"}
    documents = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": cluster},
        {"apiVersion": api, "kind": "ClusterRole", "metadata": {"name": "headrace-operator-webhook"}, "rules": rules},
        {"apiVersion": api, "kind": "Role", "metadata": own, "rules": [secret]},
        {"apiVersion": api, "kind": "ClusterRoleBinding", "metadata": cluster, "subjects": subject}
        | {"roleRef": {**role, "kind": "ClusterRole", "name": "headrace-operator-webhook"}},
        {"apiVersion": api, "kind": "RoleBinding", "metadata": own, "subjects": subject}
        | {"roleRef": {**role, "kind": "Role"}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {**own, "name": "headrace-webhook-certificate"}},
    ]
    place.apply(*documents)
    asyncio.run(_unauthenticated(place, free_port()))
    assert all(place.fetch(path)["metadata"]["ownerReferences"] for path in CONFIGURATIONS)
    place.server.kubectl("delete", "clusterrole", "headrace-operator-webhook")
    until(lambda: all(place.fetch(path) is None for path in CONFIGURATIONS))
    place.server.kubectl("delete", "clusterrolebinding,namespace", "hooks")


async def _unauthenticated(place: Any, port: int) -> None:
    from headrace.core.clock import SystemClock
    from headrace.core.telemetry.metrics import Registry
    from headrace.fleet.cluster.webhooks.reviews import ClusterSnapshot
    from headrace.fleet.cluster.webhooks.server import Webhooks
    from headrace.fleet.cluster.webhooks.settings import WebhookSettings
    from headrace.fleet.documents import ClusterFacts
    from headrace.platforms.kubernetes_client.api import connect

    api = connect(str(place.server.kubeconfig_of_nobody()))
    settings = WebhookSettings(f"127.0.0.1:{port}", "hooks", f"https://127.0.0.1:{port}", refresh_seconds=0.2)
    sight = ClusterSnapshot(ClusterFacts(), True)
    webhooks = Webhooks(api, settings, lambda: sight, Registry(SystemClock()), lambda: datetime.now(UTC))
    webhooks.lead()
    work = asyncio.create_task(webhooks.run())
    async with asyncio.timeout(90):
        while not webhooks.registered:
            await asyncio.sleep(0.05)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    await api.close()


def test_as_a_user_starts_it(place: Any) -> None:
    from webhook_site import forget, free_port, ready

    forget(place)
    port = free_port()
    words = ["operator", "run", "--no-elect", "--kubeconfig", str(place.server.kubeconfig), "--webhook-listen"]
    words += [f"127.0.0.1:{port}", "--webhook-url", f"https://127.0.0.1:{port}"]
    command = [str(Path(sys.executable).with_name("headrace")), *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ}) as process:
        try:
            ready(place)
        finally:
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=60)
    assert process.returncode == 0 and "BEGIN" not in said, said
