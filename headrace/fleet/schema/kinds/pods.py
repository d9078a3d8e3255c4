# SPDX-License-Identifier: Apache-2.0
"""Pods and containers, as far as we read them ourselves. Their other fields are kept and left to the API server."""

from __future__ import annotations

from headrace.fleet.names import MAIN_CONTAINER
from headrace.fleet.schema.fields import (
    LABEL,
    Field,
    anything,
    choice,
    many,
    mapping,
    quantity,
    record,
    text,
    texts,
    truth,
    whole,
)

RESOURCES = record(
    "resources",
    "CPU, memory and accelerators.",
    mapping("requests", "", quantity("")),
    mapping("limits", "", quantity("")),
)

ENV = many(
    "env",
    "Environment variables.",
    record(
        "",
        "",
        text("name", required=True, pattern=r"[^=]+", example="MODEL_PATH"),
        text("value"),
        anything("valueFrom"),
    ),
)

MOUNTS = many(
    "volumeMounts",
    "Where volumes are mounted.",
    record("", "", text("name", required=True), text("mountPath", required=True), truth("readOnly"), text("subPath")),
)

PORTS = many(
    "ports",
    "Ports the container listens on.",
    record(
        "",
        "",
        text("name"),
        whole("containerPort", least=1, most=65535, required=True),
        whole("hostPort", least=0, most=65535),
        choice("protocol", "", "TCP", "UDP", "SCTP"),
    ),
)


def probe(name: str) -> Field:
    """A probe: how it asks is the kubelet's, how often is read by who has no kubelet."""
    return record(
        name,
        "",
        whole("initialDelaySeconds", least=0),
        whole("periodSeconds", least=1),
        whole("timeoutSeconds", least=1),
        whole("successThreshold", least=1),
        whole("failureThreshold", least=1),
        ours=True,
    )


def container(*, named: bool) -> tuple[Field, ...]:
    """The rows of a container. A runner may go without a name: it is the main container then."""
    return (
        text("name", "Name of the container.", required=named, longest=63, pattern=LABEL, example=MAIN_CONTAINER),
        text("image", "Image to run."),
        choice("imagePullPolicy", "", "Always", "Never", "IfNotPresent"),
        texts("command", "The program and its first arguments, in place of the image's."),
        texts("args", "Arguments."),
        text("workingDir"),
        ENV,
        many("envFrom", "", record("", "")),
        RESOURCES,
        MOUNTS,
        PORTS,
        probe("livenessProbe"),
        probe("readinessProbe"),
        probe("startupProbe"),
        record("lifecycle", ""),
        record("securityContext", ""),
        truth("stdin"),
        truth("tty"),
        text("terminationMessagePath"),
        choice("terminationMessagePolicy", "", "File", "FallbackToLogsOnError"),
    )


CONTAINER = record("", "", *container(named=True), ours=True)
RUNNER = record("runner", "The main container. Merged with the runtime's.", *container(named=False))

POD: tuple[Field, ...] = (
    text("serviceAccountName", "Service account of the pods."),
    mapping("nodeSelector", "Labels that a node must have."),
    many("tolerations", "Taints that are tolerated.", record("", "", text("key"), text("operator"), text("effect"))),
    record("affinity", "Affinity and anti-affinity of the pods."),
    many("volumes", "Additional volumes.", record("", "", text("name", required=True))),
    many("containers", "Additional containers.", CONTAINER),
    many("initContainers", "Containers that run before the others.", CONTAINER),
    many("imagePullSecrets", "Secrets for registries.", record("", "", text("name"))),
    text("schedulerName"),
    text("priorityClassName"),
    text("runtimeClassName"),
    text("hostname"),
    text("subdomain"),
    text("nodeName"),
    choice("restartPolicy", "", "Always", "OnFailure", "Never"),
    choice("dnsPolicy", "", "ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    record("dnsConfig", ""),
    truth("hostNetwork"),
    truth("hostIPC"),
    truth("hostPID"),
    truth("shareProcessNamespace"),
    truth("automountServiceAccountToken"),
    truth("enableServiceLinks"),
    whole("terminationGracePeriodSeconds", least=0),
    whole("activeDeadlineSeconds", least=1),
    record("securityContext", ""),
    many("hostAliases", "", record("", "", text("ip", required=True), texts("hostnames"))),
    many("topologySpreadConstraints", "", record("", "", text("topologyKey"), whole("maxSkew", least=1))),
)
"""A pod spec, to stand among the rows of a component. `containers` may be absent."""
