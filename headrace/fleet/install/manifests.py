# SPDX-License-Identifier: Apache-2.0
"""All manifests that Headrace is installed with, for `headrace operator manifests` and the Helm chart."""

from __future__ import annotations

import json
from typing import Any

from headrace.fleet.cluster.configuration import CONFIG_MAP
from headrace.fleet.cluster.webhooks import settings as hooks
from headrace.fleet.cluster.webhooks.settings import OPT_OUT
from headrace.fleet.documents import FleetSettings
from headrace.fleet.install import rbac
from headrace.fleet.install.activator import activator_objects
from headrace.fleet.install.network_policies import network_policy_objects
from headrace.fleet.install.rbac import cluster_rules
from headrace.fleet.install.settings import (
    AGENT,
    PORT,
    ManifestSettings,
    container_security,
    field_ref,
    life_probes,
    metadata,
    pod_metadata,
    program_labels,
    pull_secrets,
    service_account,
)
from headrace.fleet.names import APP_NAME_LABEL, OPERATOR
from headrace.fleet.schema.crds import crds
from headrace.platforms.kubernetes_client.objects import Document

__all__ = ["ManifestSettings", "cluster_rules", "manifests"]


def manifests(settings: ManifestSettings) -> list[Document]:
    """Return all objects, in the order to create them."""
    objects: list[Document] = []
    if settings.has("crds"):
        objects += crds().values()
    if settings.has("namespace"):
        # The webhooks must not block a repair of the operator.
        labels = {**program_labels(OPERATOR), OPT_OUT: "disabled"}
        if settings.has("agent"):
            # The agent mounts a folder of the node, which the other Pod Security Standards forbid.
            labels["pod-security.kubernetes.io/enforce"] = "privileged"
        objects.append(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": settings.namespace, "labels": labels}}
        )
    if settings.has("config"):
        objects.append(config_map(settings))
    objects += operator_objects(settings)
    if settings.has("activator"):
        objects += activator_objects(settings)
    if settings.has("agent"):
        objects += agent_objects(settings)
    return [*objects, *network_policy_objects(settings)] if settings.network_policies else objects


EXAMPLE = "_example"


def config_map(settings: ManifestSettings) -> Document:
    """Return the ConfigMap `inferenceservice-config`, with an example of all its keys."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(settings, OPERATOR, CONFIG_MAP),
        "data": {EXAMPLE: example_config()},
    }


def example_config() -> str:
    """Return every key with its default. A test compares the keys with those that `settings_from` reads."""
    defaults = FleetSettings()
    rows = [
        ("ingressDomain", defaults.ingress_domain, "suffix of the hosts of services"),
        ("domainTemplate", defaults.domain_template, "host of a service"),
        ("pathTemplate", defaults.path_template, "path prefix, for many services on one host"),
        ("urlScheme", defaults.url_scheme, "scheme of status.url: http or https"),
        ("additionalIngressDomains", list(defaults.additional_domains), "additional domains of the same services"),
        (
            "disableIngressCreation",
            defaults.disable_ingress_creation,
            "true: clients use the Service of the same name",
        ),
        ("ingressClassName", defaults.ingress_class, "class of the Ingresses, if they are created"),
        ("enableGatewayAPI", defaults.enable_gateway_api, "HTTPRoutes instead of Ingresses"),
        ("omeIngressGateway", defaults.ingress_gateway, "their Gateway, namespace/name"),
        ("disableIstioVirtualHost", defaults.disable_istio_virtualhost, "no VirtualService for what Knative runs"),
    ]
    lines = [
        "# This example has no effect: it shows the keys that can be added next to it, with their defaults.",
        "# Read every minute. Values are JSON: copy a key with its value, without these comments.",
        "ingress: |",
        "  {",
    ]
    deploy: dict[str, Any] = {
        "defaultDeploymentMode": defaults.default_mode,
        "preStopSeconds": defaults.pre_stop_seconds,
    }
    deploy["podSecurity"] = defaults.pod_security
    width = max(len(f"{json.dumps(name)}: {json.dumps(value)},") for name, value, _ in rows)
    for number, (name, value, comment) in enumerate(rows):
        message = f"{json.dumps(name)}: {json.dumps(value)}{',' if number + 1 < len(rows) else ''}"
        lines.append(f"    {message:{width}}  # {comment}")
    lines += [
        "  }",
        "# RawDeployment or Serverless, for services that choose neither.",
        "# preStopSeconds: how long a pod keeps serving after its deletion, while the cluster stops sending it requests.",
        "# podSecurity: restricted, compatible (the same, but images that are not Headrace's may run as root) or unchanged.",
        f"deploy: '{json.dumps(deploy)}'",
        "# Prometheus server of KEDA, unless a service names another.",
        f"kedaConfig: '{json.dumps({'promServerAddress': defaults.prometheus_address})}'",
    ]
    return "\n".join(lines) + "\n"


OPERATOR_SELECTOR = {APP_NAME_LABEL: OPERATOR}


def operator_objects(settings: ManifestSettings) -> list[Document]:
    """Return all objects of the operator, in the order to create them."""
    objects = [
        service_account(settings, OPERATOR),
        *rbac.bind_cluster_role(settings, OPERATOR, rbac.cluster_rules()),
        *rbac.bind_role(settings, OPERATOR, rbac.namespace_rules()),
    ]
    if settings.has("webhook"):
        objects += webhook_objects(settings)
    if settings.replicas > 1:
        objects.append(disruption_budget(settings))
    return [*objects, deployment(settings)]


def webhook_objects(settings: ManifestSettings) -> list[Document]:
    """Return the objects of the webhooks. The operator registers them once it has a certificate."""
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(settings, OPERATOR, hooks.SECRET),
        "type": "Opaque",
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(settings, OPERATOR, hooks.SERVICE),
        "spec": {
            "selector": OPERATOR_SELECTOR,
            "ports": [{"name": "https", "port": hooks.SERVICE_PORT, "targetPort": hooks.PORT, "protocol": "TCP"}],
        },
    }
    return [
        *rbac.bind_cluster_role(settings, OPERATOR, rbac.webhook_rules(), name=hooks.ROLE),
        *rbac.bind_role(settings, OPERATOR, rbac.certificate_rules(), name=hooks.ROLE),
        secret,
        service,
    ]


def disruption_budget(settings: ManifestSettings) -> Document:
    """Return a budget that keeps at least one replica running; only for several replicas."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(settings, OPERATOR),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": OPERATOR_SELECTOR}},
    }


def deployment(settings: ManifestSettings) -> Document:
    """Return the Deployment of the operator."""
    pod = {
        "serviceAccountName": OPERATOR,
        **pull_secrets(settings),
        "containers": [_operator_container(settings)],
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(settings, OPERATOR),
        "spec": {
            "replicas": settings.replicas,
            "selector": {"matchLabels": OPERATOR_SELECTOR},
            "template": {"metadata": pod_metadata(OPERATOR), "spec": pod},
        },
    }


def _operator_container(settings: ManifestSettings) -> dict[str, Any]:
    ports = [{"name": "metrics", "containerPort": PORT, "protocol": "TCP"}]
    args = ["operator", "run", f"--listen=0.0.0.0:{PORT}", f"--namespace={settings.namespace}"]
    # The front routers that it creates use the same image.
    args.append(f"--image={settings.image}")
    ready: dict[str, Any] = {"path": "/healthz", "port": PORT}
    if settings.has("webhook"):
        ports.append({"name": "webhook", "containerPort": hooks.PORT, "protocol": "TCP"})
        args.append(f"--webhook-listen=0.0.0.0:{hooks.PORT}")
        ready = {"path": hooks.READY_PATH, "port": hooks.PORT, "scheme": "HTTPS"}
    if settings.isolate_services:
        args.append("--isolate-services")
        args += [f"--client-namespace={namespace}" for namespace in settings.client_namespaces]
    return {
        "name": "operator",
        "image": settings.image,
        "args": [*args, *settings.arguments],
        "ports": ports,
        "env": [field_ref("POD_NAME", "metadata.name")],
        **life_probes(),
        "readinessProbe": {"httpGet": ready, "periodSeconds": 5},
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": container_security(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108 the pod's own
    }


AGENT_SELECTOR = {APP_NAME_LABEL: AGENT}
_TMP = "/tmp"  # noqa: S108 the pod's own


def agent_objects(settings: ManifestSettings) -> list[Document]:
    """Return all objects of the model agent, in the order to create them."""
    return [
        service_account(settings, AGENT),
        *rbac.bind_cluster_role(settings, AGENT, rbac.agent_rules()),
        *rbac.bind_role(settings, AGENT, rbac.agent_namespace_rules(settings)),
        rbac.secrets_role(AGENT),
        daemon_set(settings),
    ]


def daemon_set(settings: ManifestSettings) -> Document:
    """Return the DaemonSet of the model agent."""
    folder = {"path": settings.models_path, "type": "DirectoryOrCreate"}
    pod = {
        "serviceAccountName": AGENT,
        **pull_secrets(settings),
        "containers": [_agent_container(settings)],
        # The folder on the node belongs to root. All capabilities are dropped.
        "securityContext": {"runAsUser": 0, "runAsNonRoot": False, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": 30,
        # Nodes with GPUs are often tainted, and models go there above all.
        "tolerations": [{"operator": "Exists"}],
        "volumes": [{"name": "models", "hostPath": folder}, {"name": "tmp", "emptyDir": {}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": metadata(settings, AGENT),
        "spec": {
            "selector": {"matchLabels": AGENT_SELECTOR},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "25%"}},
            "template": {"metadata": pod_metadata(AGENT), "spec": pod},
        },
    }


def _agent_container(settings: ManifestSettings) -> dict[str, Any]:
    folders = {"HOME": _TMP, "TMPDIR": _TMP, "HF_HOME": f"{_TMP}/hf"}
    return {
        "name": "agent",
        "image": settings.image,
        "args": [
            "model-agent",
            f"--listen=0.0.0.0:{PORT}",
            f"--namespace={settings.namespace}",
            f"--models-root={settings.models_path}",
        ],
        "ports": [{"name": "metrics", "containerPort": PORT, "protocol": "TCP"}],
        "env": [
            field_ref("NODE_NAME", "spec.nodeName"),
            *({"name": name, "value": value} for name, value in folders.items()),
        ],
        **life_probes(),
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": PORT}, "periodSeconds": 10},
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
        "securityContext": container_security(),
        # The same path as on the node: the records have absolute paths.
        "volumeMounts": [
            {"name": "models", "mountPath": settings.models_path},
            {"name": "tmp", "mountPath": _TMP},
        ],
    }
