# SPDX-License-Identifier: Apache-2.0
"""The job API in a cluster: that its objects fit together, and that its rights are those that its services need."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from headrace.cli.gateway import gateway_group
from headrace.core.errors import InvalidArgument
from headrace.jobs.manifests import GatewayManifestSettings, gateway_manifests
from headrace.platforms.kubernetes import driver
from headrace.version import __version__

ALONE = GatewayManifestSettings()
SEVERAL = GatewayManifestSettings(
    database="postgresql",
    database_secret="jobs-database",
    keys_secret="jobs-keys",
    services_namespace="models",
    pull_secret="registry",
    arguments=("--no-gpus",),
)


def made(settings: GatewayManifestSettings) -> dict[str, Any]:
    return {each["kind"]: each for each in gateway_manifests(settings)}


def pod_of(objects: dict[str, Any]) -> Any:
    workload = objects.get("StatefulSet") or objects["Deployment"]
    return workload["spec"]["template"]["spec"]


@pytest.mark.parametrize("settings", [ALONE, SEVERAL])
def test_everything_that_is_named_is_there(settings: GatewayManifestSettings) -> None:
    objects = made(settings)
    workload = objects.get("StatefulSet") or objects["Deployment"]
    labels = workload["spec"]["template"]["metadata"]["labels"].items()
    assert workload["spec"]["selector"]["matchLabels"].items() <= labels
    assert objects["Service"]["spec"]["selector"].items() <= labels
    assert objects["RoleBinding"]["roleRef"]["name"] == objects["Role"]["metadata"]["name"]
    assert objects["RoleBinding"]["subjects"] == [
        {"kind": "ServiceAccount", "name": "headrace-gateway", "namespace": "headrace-jobs"}
    ]
    assert objects["Role"]["metadata"]["namespace"] == settings.target
    pod = pod_of(objects)
    volumes = {each["name"] for each in pod["volumes"]}
    volumes |= {each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", [])}
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
    (container,) = pod["containers"]
    (port,) = [each["containerPort"] for each in container["ports"]]
    assert {container[probe]["httpGet"]["port"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")} == {
        port
    }
    assert objects["Service"]["spec"]["ports"][0]["targetPort"] == port
    assert f"--callback-url=http://headrace-gateway.headrace-jobs.svc:{port}" in container["args"]
    (grace,) = [float(word.partition("=")[2]) for word in container["args"] if word.startswith("--grace-seconds")]
    assert pod["terminationGracePeriodSeconds"] > grace


def test_sqlite_is_one_pod_with_a_volume() -> None:
    objects = made(GatewayManifestSettings(storage="5Gi", storage_class="fast", replicas=7))
    assert "Deployment" not in objects and "PodDisruptionBudget" not in objects
    assert objects["StatefulSet"]["spec"]["replicas"] == 1
    (claim,) = objects["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "5Gi"}},
        "storageClassName": "fast",
    }
    assert "initContainers" not in pod_of(objects)
    assert "Namespace" not in made(GatewayManifestSettings(create_namespace=False))


def test_gateways_of_one_database_share_its_keys_and_show_none() -> None:
    objects = made(SEVERAL)
    assert "StatefulSet" not in objects and objects["Deployment"]["spec"]["replicas"] == 2
    assert "PodDisruptionBudget" in objects
    pod = pod_of(objects)
    (container,) = pod["containers"]
    assert container["env"] == [
        {
            "name": "HEADRACE_DATABASE_URL",
            "valueFrom": {"secretKeyRef": {"name": "jobs-database", "key": "url"}},
        }
    ]
    assert {"--secrets-key=/keys/secrets.key", "--token-key=/keys/token.pem"} <= set(container["args"])
    # The gateway refuses keys that are links, or that a group may read, as all of a Secret are.
    (keys,) = pod["initContainers"]
    assert keys["command"] == ["install", "-m", "0600", "-t", "/keys", "/secret/secrets.key", "/secret/token.pem"]
    (secret,) = [each for each in pod["volumes"] if "secret" in each]
    assert secret["secret"] == {"secretName": "jobs-keys"}
    assert "postgresql://" not in json.dumps(list(objects.values()))
    assert "--platform-setting=image_pull_secret=registry" in container["args"]
    assert container["args"][-1] == "--no-gpus"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"database": "mysql"}, "write sqlite or postgresql"),
        ({"database": "postgresql", "database_secret": "a"}, "needs --database-secret NAME"),
        ({"database": "postgresql", "keys_secret": "a"}, "needs --database-secret NAME"),
        ({"keys_secret": "a"}, "are for --database postgresql"),
    ],
)
def test_databases_that_cannot_be_used_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        GatewayManifestSettings(**settings)  # type: ignore[arg-type]


def test_the_role_allows_what_the_platform_checks_for_and_no_wildcard() -> None:
    rules = made(ALONE)["Role"]["rules"]
    allowed = {
        (verb, group, resource)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert {driver._WORKLOADS["statefulset"], *driver._NEEDED} <= allowed
    assert "*" not in json.dumps(rules) and not {verb for verb, _, _ in allowed} & {"escalate", "bind", "impersonate"}


def test_the_gateway_accepts_its_arguments() -> None:
    known = {option for each in get_command(gateway_group).params for option in each.opts}
    for settings in (ALONE, SEVERAL):
        (container,) = pod_of(made(settings))["containers"]
        assert container["args"][0] == "gateway"
        given = {word.partition("=")[0] for word in container["args"][1:]}
        assert given <= known | {"--no-gpus"}, given - known


def test_the_command() -> None:
    told = CliRunner().invoke(gateway_group, ["manifests", "-n", "mine", "--image", "r/headrace:1-gateway"])
    assert told.exit_code == 0, told.output
    objects = {each["kind"]: each for each in yaml.safe_load_all(told.stdout)}
    assert objects["Namespace"]["metadata"]["name"] == "mine"
    (container,) = pod_of(objects)["containers"]
    assert container["image"] == "r/headrace:1-gateway"
    assert f"--image=headrace:{__version__}-full" in container["args"]
    refused = CliRunner().invoke(gateway_group, ["manifests", "--database", "postgresql"])
    assert refused.exit_code and "--keys-secret" in refused.output + refused.stderr
