# SPDX-License-Identifier: Apache-2.0
"""Write the Helm charts in `deploy/helm/` from what `headrace operator manifests` prints; `--check` fails on a difference.

The objects are made by the same functions, with marks in place of what a user of the chart may choose. Written as YAML, the
marks become Helm's `{{ ... }}`. By hand are the values, their schema, the helpers and NOTES.txt: they say what can be
chosen, and `tests/fleet/test_chart_platform.py` has a real helm render all of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from generated_files import write_or_check

from headrace.fleet.explain import shipped_runtimes
from headrace.fleet.install.activator import BUDGET_ABOVE, activator_budget, activator_objects
from headrace.fleet.install.manifests import (
    agent_objects,
    config_map,
    disruption_budget,
    operator_objects,
    webhook_objects,
)
from headrace.fleet.install.network_policies import network_policy_objects
from headrace.fleet.install.samples import with_image
from headrace.fleet.install.settings import ManifestSettings
from headrace.fleet.schema.crds import crds
from headrace.fleet.yaml_documents import write
from headrace.jobs.manifests import GatewayManifestSettings, gateway_manifests
from headrace.version import __version__

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy" / "helm"
HEAD = "# SPDX-License-Identifier: Apache-2.0\n# Made by scripts/generate_chart.py; do not edit.\n"
MARK = re.compile(r"MARK(\d+)KRAM")
LINE = re.compile(r"^\s*(?:- )?MARK(\d+)KRAM(?:: null)?$")
OTHER = " OTHER"
_BUDGET_VERSION = 'ternary "policy/v1beta1" "policy/v1" (semverCompare "<1.21-0" .Capabilities.KubeVersion.Version)'
BLOCK = re.compile(r"^(\s*)(.*): MARK(\d+)KRAM$")


class Marks:
    """What stands in the objects until they are text."""

    def __init__(self) -> None:
        self._texts: list[tuple[str, str]] = []

    def value(self, text: str) -> str:
        """`{{ text }}`, as a value or inside of one."""
        return self._mark("value", text)

    def line(self, text: str) -> str:
        """`{{- text }}` on a line of its own: an item of a list, or the name in a mapping."""
        return self._mark("line", text)

    def block(self, text: str) -> str:
        """What `text` is, as YAML below the name that it is the value of."""
        return self._mark("block", text)

    def resolved(self, text: str) -> str:
        """The text with all marks replaced."""
        # What looks like Helm's is not meant for Helm: placeholders of runtimes, templates of domains.
        text = text.replace("{{", '{{ "{{" }}')
        return "".join(self._line(line) for line in text.splitlines(keepends=True))

    def _line(self, line: str) -> str:
        alone, below = LINE.match(line.rstrip("\n")), BLOCK.match(line.rstrip("\n"))
        if alone and self._texts[int(alone[1])][0] == "line":
            return f"{{{{- {self._texts[int(alone[1])][1]} }}}}\n"
        if below and self._texts[int(below[3])][0] == "block":
            inside = len(below[1]) + (4 if below[2].startswith("- ") else 2)
            text = self._texts[int(below[3])][1]
            return f"{below[1]}{below[2]}:\n{' ' * inside}{{{{- toYaml {text} | nindent {inside} }}}}\n"
        return MARK.sub(lambda found: f"{{{{ {self._texts[int(found[1])][1]} }}}}", line)

    def _mark(self, kind: str, text: str) -> str:
        self._texts.append((kind, text))
        return f"MARK{len(self._texts) - 1}KRAM"


def semantic(version: str) -> str:
    """`0.1.0.dev0` as charts are numbered: `0.1.0-dev0`."""
    return re.sub(r"^(\d+\.\d+\.\d+)\.?(.+)$", r"\1-\2", version)


def when(
    marks: Marks, condition: str, inside: dict[str, Any], otherwise: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A part of a mapping that is there or not."""
    conditional = {marks.line(condition): None, **inside}
    if otherwise is not None:
        # A mapping has each of its names once: `template` takes the rest off again.
        conditional |= {marks.line("else"): None, **{f"{name}{OTHER}": value for name, value in otherwise.items()}}
    return conditional | {marks.line("end"): None}


def marked_settings(marks: Marks) -> ManifestSettings:
    """Settings in which everything is the chart's user's to say."""
    return ManifestSettings(
        namespace=marks.value(".Release.Namespace"),
        image=marks.value('include "headrace.image" .'),
        models_path=marks.value(".Values.agent.modelsPath"),
        agent_secrets=(marks.line("range .Values.agent.secrets"), marks.value(". | quote"), marks.line("end")),
        network_policies=True,
        client_namespaces=(
            marks.line("range .Values.networkPolicies.clientNamespaces"),
            marks.value(". | quote"),
            marks.line("end"),
        ),
    )


def operator_template(marks: Marks) -> list[Any]:
    """The operator."""
    settings = marked_settings(marks)
    whole: list[Any] = list(operator_objects(settings))
    left_out = {_key(obj) for obj in webhook_objects(settings)}
    objects = [obj for obj in whole if _key(obj) not in left_out]
    deployed = objects[-1]
    deployed["spec"]["replicas"] = marks.value(".Values.operator.replicas")
    pod = deployed["spec"]["template"]["spec"]
    container = pod["containers"][0]
    hook = [arg for arg in container["args"] if "webhook" in arg]
    container["args"] = [
        *(arg for arg in container["args"] if arg not in hook),
        marks.line("if .Values.webhook.enabled"),
        *hook,
        marks.line("end"),
        marks.line("if .Values.networkPolicies.services"),
        "--isolate-services",
        marks.line("range .Values.networkPolicies.clientNamespaces"),
        f"--client-namespace={marks.value('.')}",
        marks.line("end"),
        marks.line("end"),
        marks.line("range .Values.operator.arguments"),
        marks.value(". | quote"),
        marks.line("end"),
    ]
    (plain, hooked) = container["ports"]
    container["ports"] = [plain, marks.line("if .Values.webhook.enabled"), hooked, marks.line("end")]
    bare = ManifestSettings(without=frozenset({"webhook"}))
    (other,) = operator_objects(bare)[-1]["spec"]["template"]["spec"]["containers"]
    probe, plainly = container["readinessProbe"], other["readinessProbe"]["httpGet"]
    probe["httpGet"] = when(marks, "if .Values.webhook.enabled", probe["httpGet"], plainly)
    _place(marks, pod, "operator")
    budget: Any = disruption_budget(settings)
    budget["apiVersion"] = marks.value(_BUDGET_VERSION)
    return [*objects, marks.line("if gt (int .Values.operator.replicas) 1"), budget, marks.line("end")]


def agent_template(marks: Marks) -> list[Any]:
    """The model agent."""
    objects: list[Any] = agent_objects(marked_settings(marks))
    for obj in objects:
        if obj["kind"] == "ServiceAccount":
            notes = {"annotations": marks.block(".")}
            obj["metadata"].update(when(marks, "with .Values.agent.serviceAccountAnnotations", notes))
        if obj["kind"] == "Role":
            (states, secrets) = obj["rules"]
            obj["rules"] = [states, marks.line("if .Values.agent.secrets"), secrets, marks.line("end")]
    pod = objects[-1]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    container["args"] += [
        marks.line("range .Values.agent.arguments"),
        marks.value(". | quote"),
        marks.line("end"),
    ]
    container["env"].append(marks.line("range .Values.agent.env"))
    container["env"].append(marks.value("toJson ."))
    container["env"].append(marks.line("end"))
    _place(marks, pod, "agent")
    return [marks.line("if .Values.agent.enabled"), *objects, marks.line("end")]


def activator_template(marks: Marks) -> list[Any]:
    """The shared activator."""
    settings = marked_settings(marks)
    whole: list[Any] = activator_objects(settings)
    budget: Any = activator_budget(settings)
    budget["apiVersion"] = marks.value(_BUDGET_VERSION)
    objects = [obj for obj in whole if obj["kind"] != budget["kind"]]
    objects[-1]["spec"]["replicas"] = marks.value(".Values.activator.replicas")
    _place(marks, objects[-1]["spec"]["template"]["spec"], "activator")
    several = [marks.line(f"if gt (int .Values.activator.replicas) {BUDGET_ABOVE}"), budget, marks.line("end")]
    return [marks.line("if .Values.activator.enabled"), *objects, *several, marks.line("end")]


def network_policies_template(marks: Marks) -> list[Any]:
    """The NetworkPolicies of the programs."""
    policies: list[Any] = network_policy_objects(marked_settings(marks))
    for obj in policies:
        metrics = obj["spec"]["ingress"][0]
        own, named = metrics["from"]
        metrics["from"] = [own, marks.line("if .Values.networkPolicies.clientNamespaces"), named, marks.line("end")]
    operator, activator, agent = policies
    metrics, hook = operator["spec"]["ingress"]
    operator["spec"]["ingress"] = [metrics, marks.line("if .Values.webhook.enabled"), hook, marks.line("end")]
    return [
        marks.line("if .Values.networkPolicies.enabled"),
        operator,
        # Ranges of ports are in Kubernetes from 1.25 on.
        marks.line(
            'if and .Values.activator.enabled (semverCompare ">=1.25-0" .Capabilities.KubeVersion.Version)',
        ),
        activator,
        marks.line("end"),
        marks.line("if .Values.agent.enabled"),
        agent,
        marks.line("end"),
        marks.line("end"),
    ]


def config_template(marks: Marks) -> list[Any]:
    """The settings of all services."""
    document: Any = config_map(marked_settings(marks))
    said = {marks.value("$name | quote"): marks.value("$value | toJson | quote")}
    document["data"] |= when(marks, "range $name, $value := .Values.config", said)
    return [document]


def webhook_template(marks: Marks) -> list[Any]:
    """What the webhooks need."""
    webhooks = webhook_objects(marked_settings(marks))
    return [marks.line("if .Values.webhook.enabled"), *webhooks, marks.line("end")]


def gateway_template(marks: Marks) -> list[Any]:
    """The gateway of the job API, with either database."""
    chosen: dict[str, Any] = {
        "namespace": marks.value(".Release.Namespace"),
        "services_namespace": marks.value(".Values.servicesNamespace | default .Release.Namespace"),
        "image": marks.value('include "headrace.gatewayImage" .'),
        "services_image": marks.value('include "headrace.servicesImage" .'),
        "create_namespace": False,
    }
    alone = GatewayManifestSettings(
        **chosen, storage=marks.value(".Values.sqlite.storage"), storage_class=marks.value(".")
    )
    several = GatewayManifestSettings(
        **chosen,
        database="postgresql",
        database_secret=marks.value(".Values.postgresql.databaseSecret"),
        keys_secret=marks.value(".Values.postgresql.keysSecret"),
    )
    common: list[Any] = gateway_manifests(alone)
    stateful: Any = common.pop()
    *_, budget, deployment = gateway_manifests(several)
    workloads: list[Any] = [stateful, deployment]
    claim = stateful["spec"]["volumeClaimTemplates"][0]["spec"]
    named = {"storageClassName": claim.pop("storageClassName")}
    claim |= when(marks, "with .Values.sqlite.storageClass", named)
    deployment["spec"]["replicas"] = marks.value(".Values.replicas")
    budget["apiVersion"] = marks.value(_BUDGET_VERSION)
    for workload in workloads:
        pod = workload["spec"]["template"]["spec"]
        container = pod["containers"][0]
        container["args"] += [
            marks.line("with (first .Values.image.pullSecrets)"),
            f"--platform-setting=image_pull_secret={marks.value('.name')}",
            marks.line("end"),
            marks.line("range .Values.arguments"),
            marks.value(". | quote"),
            marks.line("end"),
        ]
        _place(marks, pod, "")
    return [
        *common,
        marks.line('if eq .Values.database "sqlite"'),
        stateful,
        marks.line("else"),
        deployment,
        marks.line("if gt (int .Values.replicas) 1"),
        budget,
        marks.line("end"),
        marks.line("end"),
    ]


def runtimes_template(marks: Marks) -> list[Any]:
    """The runtimes."""
    ours, full = marks.value('include "headrace.image" .'), marks.value('include "headrace.fullImage" .')
    runtimes = with_image(shipped_runtimes(), ours, full)
    return [marks.line("if .Values.runtimes.enabled"), *runtimes, marks.line("end")]


def _place(marks: Marks, pod: dict[str, Any], program: str) -> None:
    """Where a pod runs, and what it may use, by the values of a program or, for "", of the chart."""
    values = f".Values.{program}" if program else ".Values"
    container = pod["containers"][0]
    container["resources"] = marks.block(f"{values}.resources")
    policy = {"imagePullPolicy": marks.value(".")}
    container |= when(marks, "with .Values.image.pullPolicy", policy)
    pod.pop("tolerations", None)
    for name in ("nodeSelector", "affinity", "tolerations"):
        pod |= when(marks, f"with {values}.{name}", {name: marks.block(".")})
    pod |= when(marks, f"with {values}.priorityClassName", {"priorityClassName": marks.value(". | quote")})
    pod |= when(marks, "with .Values.image.pullSecrets", {"imagePullSecrets": marks.block(".")})


def _key(document: Any) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def template(parts: Iterable[Any], marks: Marks) -> str:
    """Documents, and lines between them, as a file of the chart."""
    text = ""
    for part in parts:
        text += marks.resolved(part + "\n") if isinstance(part, str) else "---\n" + marks.resolved(write([part]))
    return text.replace(f"{OTHER}:", ":")


def crd_template(definition: Any) -> str:
    """A kind: it stays when the chart goes, since every service would go with it."""
    marks = Marks()
    named = definition["metadata"]
    annotations = {"annotations": {"helm.sh/resource-policy": "keep"}}
    return template([{**definition, "metadata": {**named, **when(marks, "if .Values.keep", annotations)}}], marks)


def chart(name: str, says: str) -> str:
    """Chart.yaml."""
    metadata = {
        "apiVersion": "v2",
        "name": name,
        "description": says,
        "type": "application",
        "version": semantic(__version__),
        "appVersion": __version__,
        "kubeVersion": ">=1.20.0-0",
    }
    return write([metadata])


def files() -> dict[str, str]:
    """Every generated file of both charts."""
    says = (
        "InferenceServices on Kubernetes: the operator, its webhooks and the model agent. Install headrace-crds first."
    )
    files_by_path = {
        "headrace/Chart.yaml": chart("headrace", says),
        "headrace-crds/Chart.yaml": chart("headrace-crds", "The kinds of InferenceServices, for the chart headrace."),
    }
    for name, definition in crds().items():
        files_by_path[f"headrace-crds/templates/{name}"] = crd_template(definition)
    makers = (
        config_template,
        operator_template,
        webhook_template,
        activator_template,
        agent_template,
        network_policies_template,
        runtimes_template,
    )
    says = "The gateway of Headrace's job API: TAO's inference microservices as pods."
    files_by_path["headrace-gateway/Chart.yaml"] = chart("headrace-gateway", says)
    marks = Marks()
    files_by_path["headrace-gateway/templates/gateway.yaml"] = template(gateway_template(marks), marks)
    for make in makers:
        marks = Marks()
        name = make.__name__.removesuffix("_template")
        files_by_path[f"headrace/templates/{name}.yaml"] = template(make(marks), marks)
    return {name: HEAD + text for name, text in files_by_path.items()}


def main() -> int:
    """Write, or compare."""
    fresh = {FOLDER / name: text for name, text in files().items()}
    return write_or_check(fresh, [*FOLDER.glob("*/templates/*.yaml"), *FOLDER.glob("*/Chart.yaml")])


if __name__ == "__main__":
    sys.exit(main())
