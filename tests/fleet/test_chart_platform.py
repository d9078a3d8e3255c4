# SPDX-License-Identifier: Apache-2.0
"""A real helm renders the charts: the same objects as `headrace operator manifests` prints, whatever is chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helm_chart import CHARTS, by_key, helm, rendered

from headrace.fleet.explain import shipped_runtimes
from headrace.fleet.install.manifests import ManifestSettings, manifests
from headrace.fleet.install.samples import with_image
from headrace.fleet.schema.crds import crds
from headrace.jobs.manifests import GatewayManifestSettings, gateway_manifests

pytestmark = [pytest.mark.platform, pytest.mark.timeout(900)]

WITHOUT = frozenset({"crds", "namespace"})
PLAIN = ManifestSettings(without=WITHOUT, network_policies=True)
OTHERS: list[tuple[Any, ManifestSettings]] = [
    (
        {"image": {"repository": "r.example:5000/team/headrace", "tag": "1.2"}, "operator": {"replicas": 3}},
        replace(PLAIN, image="r.example:5000/team/headrace:1.2", replicas=3),
    ),
    (
        {"webhook": {"enabled": False}, "agent": {"modelsPath": "/data/m", "secrets": ["hf", "s3"]}},
        replace(PLAIN, without=WITHOUT | {"webhook"}, models_path="/data/m", agent_secrets=("hf", "s3")),
    ),
    (
        {
            "agent": {"enabled": False},
            "image": {"pullSecrets": [{"name": "mine"}]},
            "operator": {"arguments": ["--node-pinning=none", "--log-level=debug"]},
        },
        replace(
            PLAIN,
            without=WITHOUT | {"agent"},
            pull_secret="mine",
            arguments=("--node-pinning=none", "--log-level=debug"),
        ),
    ),
    (
        {
            "activator": {"replicas": 3},
            "networkPolicies": {"services": True, "clientNamespaces": ["ingress-nginx", "monitoring"]},
        },
        replace(PLAIN, activator_replicas=3, isolate_services=True, client_namespaces=("ingress-nginx", "monitoring")),
    ),
    (
        {"activator": {"enabled": False}, "networkPolicies": {"enabled": False}},
        replace(PLAIN, without=WITHOUT | {"activator"}, network_policies=False),
    ),
]


def test_the_kinds() -> None:
    found = rendered("headrace-crds")
    for each in found.values():
        assert each["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert found == by_key(crds().values())
    assert rendered("headrace-crds", {"keep": False}) == by_key(crds().values())


@pytest.mark.parametrize(("values", "settings"), [({}, PLAIN), *OTHERS])
def test_the_chart_makes_what_the_manifests_are(values: Any, settings: ManifestSettings) -> None:
    found = rendered("headrace", values)
    wanted = by_key([*manifests(settings), *with_image(shipped_runtimes(), settings.image)])
    assert found.keys() == wanted.keys()
    for key, each in wanted.items():
        assert found[key] == each, key


POSTGRESQL = {"databaseSecret": "db", "keysSecret": "keys"}
GATEWAYS: list[tuple[Any, Any]] = [
    ({}, {}),
    (
        {
            "servicesNamespace": "models",
            "servicesImage": "r/headrace:2",
            "sqlite": {"storage": "5Gi", "storageClass": "fast"},
            "image": {"pullSecrets": [{"name": "mine"}]},
        },
        {
            "services_namespace": "models",
            "services_image": "r/headrace:2",
            "storage": "5Gi",
            "storage_class": "fast",
            "pull_secret": "mine",
        },
    ),
    (
        {"database": "postgresql", "postgresql": POSTGRESQL, "replicas": 3, "arguments": ["--no-gpus"]},
        {
            "database": "postgresql",
            "database_secret": "db",
            "keys_secret": "keys",
            "replicas": 3,
            "arguments": ("--no-gpus",),
        },
    ),
]


@pytest.mark.parametrize(("values", "settings"), GATEWAYS)
def test_the_chart_of_the_gateway_makes_what_its_manifests_are(values: Any, settings: Any) -> None:
    settings = GatewayManifestSettings(namespace="headrace-system", create_namespace=False, **settings)
    assert rendered("headrace-gateway", values) == by_key(gateway_manifests(settings))


def test_postgresql_without_its_secrets_is_refused() -> None:
    told = helm("template", "x", CHARTS / "headrace-gateway", "--set", "database=postgresql", check=False)
    assert told.returncode and "databaseSecret" in told.stderr


def test_the_namespace_is_the_releases() -> None:
    found = rendered("headrace", {"runtimes": {"enabled": False}}, namespace="elsewhere")
    assert found == by_key(manifests(replace(PLAIN, namespace="elsewhere")))


def test_what_only_the_chart_has() -> None:
    taint = [{"key": "a", "operator": "Exists"}]
    values = {
        "operator": {"tolerations": taint, "nodeSelector": {"b": "c"}, "priorityClassName": "high"},
        "agent": {
            "env": [{"name": "HF_ENDPOINT", "value": "https://m"}],
            "arguments": ["--download-concurrency=4"],
            "tolerations": [],
            "resources": {"limits": {"memory": "3Gi"}},
            "affinity": {"nodeAffinity": {}},
            "serviceAccountAnnotations": {"eks.amazonaws.com/role-arn": "arn:1"},
        },
        "image": {"digest": "sha256:" + "a" * 64, "pullPolicy": "Always"},
        "config": {"ingress": {"ingressDomain": "x.example", "disableIngressCreation": False}},
    }
    found = rendered("headrace", values)
    operator = found["Deployment", "headrace-system", "headrace-operator"]["spec"]["template"]["spec"]
    agent = found["DaemonSet", "headrace-system", "headrace-model-agent"]["spec"]["template"]["spec"]
    assert operator["tolerations"] == taint
    assert operator["nodeSelector"] == {"b": "c"}
    assert operator["priorityClassName"] == "high"
    container = agent["containers"][0]
    assert container["env"][-1] == {"name": "HF_ENDPOINT", "value": "https://m"}
    assert container["args"][-1] == "--download-concurrency=4"
    assert "tolerations" not in agent and agent["affinity"] == {"nodeAffinity": {}}
    assert container["resources"]["limits"] == {"memory": "3Gi"}
    assert container["image"] == f"headrace@sha256:{'a' * 64}" and container["imagePullPolicy"] == "Always"
    account = found["ServiceAccount", "headrace-system", "headrace-model-agent"]
    assert account["metadata"]["annotations"] == {"eks.amazonaws.com/role-arn": "arn:1"}

    from headrace.fleet.cluster.configuration import settings_from
    from headrace.fleet.documents import FleetSettings

    told = found["ConfigMap", "headrace-system", "inferenceservice-config"]
    wanted = FleetSettings(ingress_domain="x.example", disable_ingress_creation=False)
    assert settings_from(FleetSettings(), told) == wanted


@pytest.mark.parametrize(
    "wrong",
    ["operator.replicas=-1", "operator.replica=2", "agent.modelsPath=models", "image.pullPolicy=Sometimes"],
)
def test_values_that_are_wrong_are_refused(wrong: str) -> None:
    told = helm("template", "x", CHARTS / "headrace", "--set", wrong, check=False)
    assert told.returncode != 0
    assert "values don't meet the specifications" in told.stderr, told.stderr


def test_helm_lint_finds_nothing() -> None:
    said = helm("lint", "--strict", CHARTS / "headrace", CHARTS / "headrace-crds").stdout
    assert "2 chart(s) linted, 0 chart(s) failed" in said and "[WARNING]" not in said, said
