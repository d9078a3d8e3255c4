# SPDX-License-Identifier: Apache-2.0
"""What Headrace is installed with: that its objects fit together, and that its rights are no larger than they must be."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from headrace.cli.operator import operator
from headrace.core.errors import InvalidArgument
from headrace.fleet.cluster import configuration
from headrace.fleet.documents import FleetSettings
from headrace.fleet.install.manifests import EXAMPLE, ManifestSettings, manifests
from headrace.fleet.install.settings import PARTS
from support.programs import run_script

ROOT = Path(__file__).parents[2]
MANY = ManifestSettings(replicas=3, agent_secrets=("hf-token",), pull_secret="registry", arguments=("--workers=8",))


def made(settings: ManifestSettings = MANY) -> dict[tuple[str, str], Any]:
    found = {(each["kind"], each["metadata"]["name"]): each for each in manifests(settings)}
    assert len(found) == len(manifests(settings))
    return found


def programs(objects: dict[tuple[str, str], Any]) -> list[Any]:
    return [each for (kind, _), each in objects.items() if kind in ("Deployment", "DaemonSet")]


def test_everything_that_is_named_is_there() -> None:
    objects = made()
    for (kind, _), each in objects.items():
        assert each["metadata"]["labels" if kind != "CustomResourceDefinition" else "name"]
        if kind.endswith("Binding"):
            role = each["roleRef"]
            assert (role["kind"], role["name"]) in objects and role["kind"] + "Binding" == kind
            for subject in each["subjects"]:
                account = objects[subject["kind"], subject["name"]]
                assert account["metadata"]["namespace"] == subject["namespace"]
    for each in programs(objects):
        spec, template = each["spec"], each["spec"]["template"]
        chosen = spec["selector"]["matchLabels"].items()
        assert chosen <= template["metadata"]["labels"].items()
        assert ("ServiceAccount", template["spec"]["serviceAccountName"]) in objects
        (container,) = template["spec"]["containers"]
        ports = {port["containerPort"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["port"] in ports
        # On a busy node a program imports its packages for more than a minute, and was killed for it, again and again.
        started = container["startupProbe"]
        assert started["periodSeconds"] * started["failureThreshold"] >= 300
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in template["spec"]["volumes"]
        }
        assert template["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    labels = [each["spec"]["template"]["metadata"]["labels"].items() for each in programs(objects)]
    for (kind, _), each in objects.items():
        if kind in ("Service", "PodDisruptionBudget"):
            selector = each["spec"]["selector"]
            assert sum(selector.get("matchLabels", selector).items() <= one for one in labels) == 1
    (service,) = [each for (kind, _), each in objects.items() if kind == "Service"]
    assert service["spec"]["ports"][0]["targetPort"] == 9443


def test_programs_may_do_nothing_but_run() -> None:
    for each in programs(made()):
        pod = each["spec"]["template"]["spec"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"].keys() == {"memory"}
        if each["kind"] == "Deployment":
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert not any("hostPath" in volume for volume in pod["volumes"])
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}


def rules() -> list[tuple[str, str, Any]]:
    return [
        (kind, name, rule)
        for (kind, name), each in made().items()
        if kind in ("Role", "ClusterRole")
        for rule in each["rules"]
    ]


def test_no_right_is_a_wildcard_or_leads_to_others() -> None:
    for _, name, rule in rules():
        said = json.dumps(rule)
        assert "*" not in said, (name, rule)
        assert not {"bind", "escalate", "impersonate", "deletecollection"} & set(rule["verbs"]), (name, rule)
        forbidden = {"pods/exec", "clusterrolebindings", "serviceaccounts/token"}
        if rule["verbs"] != ["get"] or rule.get("resourceNames") != [name]:  # its own name is no secret
            forbidden.add("clusterroles")
        assert not forbidden & set(rule["resources"]), (name, rule)


def test_secrets_are_read_by_name() -> None:
    found = {(kind, name): rule.get("resourceNames") for kind, name, rule in rules() if "secrets" in rule["resources"]}
    assert found == {
        ("Role", "headrace-operator-webhook"): ["headrace-webhook-certificate"],
        ("Role", "headrace-model-agent"): ["hf-token"],
        ("ClusterRole", "headrace-model-agent-secrets"): None,
    }
    bound = {each["roleRef"]["name"] for (kind, _), each in made().items() if kind.endswith("Binding")}
    assert "headrace-model-agent-secrets" not in bound


def test_no_right_is_given_twice() -> None:
    given: list[tuple[str, ...]] = []
    for kind, name, rule in rules():
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                given += [(kind, name, group, resource, verb) for verb in rule["verbs"]]
    assert len(set(given)) == len(given)


def test_parts_are_left_out() -> None:
    kinds = {
        "crds": {"CustomResourceDefinition"},
        "namespace": {"Namespace"},
        "config": {"ConfigMap"},
        "webhook": {"Service", "Secret"},
        "agent": {"DaemonSet"},
        "activator": set(),
    }
    assert kinds.keys() == set(PARTS)
    whole = made()
    for part, gone in kinds.items():
        less = made(ManifestSettings(replicas=3, without=frozenset({part})))
        assert {kind for kind, _ in whole} - {kind for kind, _ in less} == gone
        assert less.keys() < whole.keys()
    bare = made(ManifestSettings(without=frozenset(PARTS)))
    assert {kind for kind, _ in bare} == {
        "ServiceAccount",
        "ClusterRole",
        "ClusterRoleBinding",
        "Role",
        "RoleBinding",
        "Deployment",
    }
    assert "webhook" not in json.dumps(list(bare.values()))
    with pytest.raises(InvalidArgument, match="wings cannot be left out: only crds"):
        ManifestSettings(without=frozenset({"wings"}))


def test_the_namespace_is_as_restricted_as_the_agent_allows() -> None:
    for without, wanted in ((frozenset[str](), "privileged"), (frozenset({"agent"}), None)):
        labels = made(ManifestSettings(without=without))["Namespace", "headrace-system"]["metadata"]["labels"]
        assert labels.get("pod-security.kubernetes.io/enforce") == wanted
        assert labels["ome.io/webhooks"] == "disabled"


def test_one_alone_may_be_drained() -> None:
    assert ("PodDisruptionBudget", "headrace-operator") in made()
    assert ("PodDisruptionBudget", "headrace-operator") not in made(ManifestSettings())
    assert ("PodDisruptionBudget", "headrace-activator") in made(ManifestSettings(activator_replicas=3))
    # Kubernetes 1.20 has no policy/v1.
    assert not any(kind == "PodDisruptionBudget" for kind, _ in made(ManifestSettings()))


def test_the_activator_may_only_read_workloads() -> None:
    """What it may scale follows from the Roles of services."""
    found = [rule for _, name, rule in rules() if name == "headrace-activator"]
    assert {(resource, verb) for rule in found for resource in rule["resources"] for verb in rule["verbs"]} == {
        (resource, verb) for resource in ("deployments", "leaderworkersets") for verb in ("list", "watch")
    }
    whole, less = made(), made(ManifestSettings(replicas=3, without=frozenset({"activator"})))
    assert {name for _, name in whole} - {name for _, name in less} == {"headrace-activator"}


def test_the_activator_outlives_its_endpoints_and_its_held_requests() -> None:
    pod = made()["Deployment", "headrace-activator"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (wait,) = [int(word) for word in container["lifecycle"]["preStop"]["exec"]["command"] if word.isdigit()]
    (grace,) = [float(word.partition("=")[2]) for word in container["args"] if word.startswith("--grace-seconds")]
    assert pod["terminationGracePeriodSeconds"] > wait + grace


def options_of(command: Any) -> set[str]:
    return {option for each in command.params for option in (*each.opts, *each.secondary_opts)}


def test_the_programs_accept_their_arguments() -> None:
    from headrace.cli.model_agent import model_agent

    alone = typer.Typer()
    alone.command()(model_agent)
    known = {
        **{
            ("operator", verb): options_of(get_command(operator).commands[verb])  # type: ignore[attr-defined]
            for verb in ("run", "activator")
        },
        ("model-agent",): options_of(get_command(alone)),
    }
    for each in programs(made()):
        words = each["spec"]["template"]["spec"]["containers"][0]["args"]
        (verb,) = [verb for verb in known if tuple(words[: len(verb)]) == verb]
        assert {word.partition("=")[0] for word in words[len(verb) :]} <= known[verb], words
    assert (
        f"--image={FleetSettings.image}"
        in made()["Deployment", "headrace-operator"]["spec"]["template"]["spec"]["containers"][0]["args"]
    ), "routers are of the same image"


def test_the_example_of_settings_has_the_defaults() -> None:
    said = made()["ConfigMap", "inferenceservice-config"]["data"]
    assert said.keys() == {EXAMPLE}
    example = yaml.safe_load(re.sub(r" +# .*", "", said[EXAMPLE]))
    assert example.keys() == {"ingress", "deploy", "kedaConfig"}
    known = {*configuration._STRINGS, *configuration._SWITCHES, "additionalIngressDomains"}
    assert json.loads(example["ingress"]).keys() == known
    odd = FleetSettings(
        default_mode="Serverless",
        ingress_domain="x",
        ingress_class="y",
        domain_template="z",
        url_scheme="https",
        disable_ingress_creation=False,
        enable_gateway_api=True,
        disable_istio_virtualhost=True,
        prometheus_address="http://p",
    )
    assert configuration.settings_from(odd, {"data": example}) == FleetSettings()
    assert configuration.settings_from(odd, {"data": said}) == odd, "the example itself says nothing"


def test_the_command() -> None:
    run = CliRunner()
    told = run.invoke(operator, ["manifests", "--without", "crds", "--image", "r/h:1", "-n", "mine", "--replicas", "2"])
    assert told.exit_code == 0, told.output
    wanted = ManifestSettings("mine", "r/h:1", 2, without=frozenset({"crds"}))
    assert list(yaml.safe_load_all(told.output)) == json.loads(json.dumps(manifests(wanted)))
    shown = run.invoke(operator, ["manifests", "--runtimes", "--image", "r/h:1"])
    assert {each["kind"] for each in yaml.safe_load_all(shown.output)} == {"ClusterServingRuntime"}
    assert "r/h:1-full" in shown.output and FleetSettings.image not in shown.output
    wrong = run.invoke(operator, ["manifests", "--without", "wings"])
    assert wrong.exit_code != 0 and "wings cannot be left out" in wrong.output


def test_samples_are_printed() -> None:
    run = CliRunner()
    names = sorted(path.stem for path in (ROOT / "headrace" / "fleet" / "samples").glob("*.yaml"))
    for name in names:
        told = run.invoke(operator, ["manifests", "--sample", name])
        assert told.output == (ROOT / "headrace" / "fleet" / "samples" / f"{name}.yaml").read_text()
    other = run.invoke(operator, ["manifests", "--sample", "accelerators", "--image", "r/h:1"]).output
    assert "image: r/h:1-full\n" in other
    assert "image: r/h:1\n" in run.invoke(operator, ["manifests", "--sample", "own-runtime", "--image", "r/h:1"]).output
    wrong = run.invoke(operator, ["manifests", "--sample", "car"])
    assert wrong.exit_code != 0 and "there is no sample car: there are accelerators" in wrong.output


@pytest.mark.parametrize("script", ["generate_crds", "generate_chart", "generate_reference"])
def test_what_is_generated_is_up_to_date(script: str) -> None:
    told = run_script(ROOT / "scripts" / f"{script}.py", "--check")
    assert told.returncode == 0, told.stdout + told.stderr
