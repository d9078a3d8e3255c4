# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes objects of the job API: the gateway with its database, and its permission to start services as pods.

Used by `headrace gateway manifests` and by the chart `headrace-gateway`. With SQLite the gateway is a StatefulSet of one pod
with a volume; with PostgreSQL it is a Deployment of any size, whose pods share the keys of a Secret.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.fleet.install.samples import full_image_of
from headrace.fleet.install.settings import container_security, program_labels
from headrace.fleet.names import APP_NAME_LABEL
from headrace.platforms.kubernetes_client.objects import Document
from headrace.version import __version__

GATEWAY = "headrace-gateway"
PORT = 8090
DATABASES = ("sqlite", "postgresql")
GRACE_SECONDS = 300
"""How long requests to services may take after SIGTERM."""
KEYS = {"secrets.key": "--secrets-key", "token.pem": "--token-key"}
"""Keys of the Secret that several gateways share, and the options that they are for."""
DATABASE_KEY = "url"
"""Key of the Secret with the address of PostgreSQL."""
_PRE_STOP_SECONDS = 5
_EXIT_SECONDS = 30
_GROUP = 10001
"""The group of our image's user."""
_DATA, _KEYS, _SECRET = "/data", "/keys", "/secret"
_TMP = "/tmp"  # noqa: S108 the pod's own
_RBAC = "rbac.authorization.k8s.io"
SELECTOR = {APP_NAME_LABEL: GATEWAY}

_EDIT = ("get", "list", "create", "patch", "delete")
LAUNCHER_RULES: tuple[tuple[Sequence[str], Sequence[str], Sequence[str]], ...] = (
    (("apps",), ("statefulsets",), _EDIT),
    (("apps",), ("statefulsets/finalizers",), ("update",)),
    (("",), ("services", "secrets"), _EDIT),
    (("",), ("pods",), ("get", "list", "delete")),
    (("",), ("pods/log",), ("get",)),
    (("",), ("events",), ("list",)),
)
"""What the platform `kubernetes` needs to run services as StatefulSets: API groups, resources and verbs."""


@dataclass(frozen=True)
class GatewayManifestSettings:
    """Settings of the manifests."""

    namespace: str = "headrace-jobs"
    services_namespace: str = ""
    """Namespace of the services; "": that of the gateway."""
    image: str = f"headrace:{__version__}-gateway"
    """Image with the extras `jobs`, `kubernetes` and, for PostgreSQL, `postgresql`."""
    services_image: str = full_image_of(f"headrace:{__version__}")
    """Image of services."""
    database: str = "sqlite"
    """One of `DATABASES`."""
    database_secret: str = ""
    """Secret with the address of PostgreSQL, under `url`."""
    keys_secret: str = ""
    """Secret with `secrets.key` and `token.pem`, which several gateways share."""
    replicas: int = 2
    """Replicas with PostgreSQL; with SQLite there is one."""
    storage: str = "10Gi"
    """Size of the volume with SQLite."""
    storage_class: str = ""
    """"" for the cluster's default."""
    pull_secret: str = ""
    """Image pull Secret, in the namespaces of the gateway and of the services."""
    arguments: tuple[str, ...] = ()
    """Additional arguments of `headrace gateway`."""
    create_namespace: bool = True

    def __post_init__(self) -> None:
        if self.database not in DATABASES:
            raise InvalidArgument(f"--database {self.database[:32]!a}: write {' or '.join(DATABASES)}")
        if self.database == "sqlite" and (self.database_secret or self.keys_secret):
            raise InvalidArgument("--database-secret and --keys-secret are for --database postgresql")
        if self.database == "postgresql" and not (self.database_secret and self.keys_secret):
            raise InvalidArgument(
                "--database postgresql needs --database-secret NAME, with the key url, and --keys-secret NAME, with "
                "secrets.key and token.pem: all gateways of a database share them"
            )

    @property
    def target(self) -> str:
        """Namespace of the services."""
        return self.services_namespace or self.namespace


def gateway_manifests(settings: GatewayManifestSettings) -> list[Document]:
    """Return all objects, in the order to create them."""
    objects: list[Document] = []
    if settings.create_namespace:
        labels = program_labels(GATEWAY)
        metadata = {"name": settings.namespace, "labels": labels}
        objects.append({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    objects += [account(settings), *launcher_role(settings), service(settings)]
    if settings.database == "sqlite":
        return [*objects, stateful_set(settings)]
    if settings.replicas > 1:
        objects.append(disruption_budget(settings))
    return [*objects, deployment(settings)]


def account(settings: GatewayManifestSettings) -> Document:
    """Return the gateway's ServiceAccount."""
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _metadata(settings)}


def launcher_role(settings: GatewayManifestSettings) -> list[Document]:
    """Return the Role in the services' namespace, and its binding to the gateway."""
    metadata = {**_metadata(settings), "namespace": settings.target}
    rules = [
        {"apiGroups": list(groups), "resources": list(resources), "verbs": list(verbs)}
        for groups, resources, verbs in LAUNCHER_RULES
    ]
    subject = {"kind": "ServiceAccount", "name": GATEWAY, "namespace": settings.namespace}
    reference = {"apiGroup": _RBAC, "kind": "Role", "name": GATEWAY}
    return [
        {"apiVersion": f"{_RBAC}/v1", "kind": "Role", "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": reference,
            "subjects": [subject],
        },
    ]


def service(settings: GatewayManifestSettings) -> Document:
    """Return the Service for clients, and for services that report to the gateway."""
    port = {"name": "http", "port": PORT, "targetPort": PORT, "protocol": "TCP"}
    spec = {"selector": SELECTOR, "ports": [port]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(settings), "spec": spec}


def stateful_set(settings: GatewayManifestSettings) -> Document:
    """Return the gateway with SQLite on a volume. One pod: two would have two databases."""
    claim: dict[str, Any] = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": settings.storage}},
    }
    if settings.storage_class:
        claim["storageClassName"] = settings.storage_class
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _metadata(settings),
        "spec": {
            "replicas": 1,
            "serviceName": GATEWAY,
            "selector": {"matchLabels": SELECTOR},
            "template": _template(settings, {}),
            "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": claim}],
        },
    }


def deployment(settings: GatewayManifestSettings) -> Document:
    """Return the gateways that share a PostgreSQL database."""
    volumes = {
        "data": {"emptyDir": {}},
        "keys": {"emptyDir": {"medium": "Memory"}},
        "secret": {"secret": {"secretName": settings.keys_secret}},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(settings),
        "spec": {
            "replicas": settings.replicas,
            "selector": {"matchLabels": SELECTOR},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": _template(settings, volumes),
        },
    }


def disruption_budget(settings: GatewayManifestSettings) -> Document:
    """Return a budget that takes away one replica at a time."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(settings),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": SELECTOR}},
    }


def _metadata(settings: GatewayManifestSettings) -> dict[str, Any]:
    return {"name": GATEWAY, "namespace": settings.namespace, "labels": program_labels(GATEWAY)}


def _template(settings: GatewayManifestSettings, volumes: Mapping[str, Any]) -> dict[str, Any]:
    all_volumes = {**volumes, "tmp": {"emptyDir": {}}}
    pod: dict[str, Any] = {
        "serviceAccountName": GATEWAY,
        "containers": [_container(settings)],
        "securityContext": {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
            # The volume belongs to the program's group, and so do the files of the Secret.
            "fsGroup": _GROUP,
        },
        "terminationGracePeriodSeconds": _PRE_STOP_SECONDS + GRACE_SECONDS + _EXIT_SECONDS,
        "volumes": [{"name": name, **source} for name, source in all_volumes.items()],
    }
    if settings.database == "postgresql":
        pod["initContainers"] = [_key_container(settings)]
    if settings.pull_secret:
        pod["imagePullSecrets"] = [{"name": settings.pull_secret}]
    annotations = {"prometheus.io/scrape": "true", "prometheus.io/port": str(PORT), "prometheus.io/path": "/metrics"}
    return {"metadata": {"labels": program_labels(GATEWAY), "annotations": annotations}, "spec": pod}


def _key_container(settings: GatewayManifestSettings) -> dict[str, Any]:
    """Return the init container that copies the keys: those of a Secret are links, and readable by a group."""
    return {
        "name": "keys",
        "image": settings.image,
        "command": ["install", "-m", "0600", "-t", _KEYS, *(f"{_SECRET}/{name}" for name in KEYS)],
        "securityContext": container_security(),
        "volumeMounts": [
            {"name": "keys", "mountPath": _KEYS},
            {"name": "secret", "mountPath": _SECRET, "readOnly": True},
        ],
    }


def _container(settings: GatewayManifestSettings) -> dict[str, Any]:
    args = [
        "gateway",
        "--host=0.0.0.0",
        f"--port={PORT}",
        # TLS ends at the ingress: keys and tokens are in clear text from there on.
        "--insecure",
        f"--data-dir={_DATA}/gateway",
        f"--grace-seconds={GRACE_SECONDS}",
        "--platform=kubernetes",
        f"--platform-setting=namespace={settings.target}",
        f"--image={settings.services_image}",
        f"--callback-url=http://{GATEWAY}.{settings.namespace}.svc:{PORT}",
    ]
    if settings.pull_secret:
        args.append(f"--platform-setting=image_pull_secret={settings.pull_secret}")
    mounts: list[dict[str, Any]] = [{"name": "data", "mountPath": _DATA}, {"name": "tmp", "mountPath": _TMP}]
    container: dict[str, Any] = {"name": "gateway", "image": settings.image}
    if settings.database == "postgresql":
        args += [f"{option}={_KEYS}/{name}" for name, option in KEYS.items()]
        mounts.append({"name": "keys", "mountPath": _KEYS, "readOnly": True})
        reference = {"name": settings.database_secret, "key": DATABASE_KEY}
        container["env"] = [{"name": "HEADRACE_DATABASE_URL", "valueFrom": {"secretKeyRef": reference}}]
    return {
        **container,
        "args": [*args, *settings.arguments],
        "ports": [{"name": "http", "containerPort": PORT, "protocol": "TCP"}],
        "startupProbe": {
            "httpGet": {"path": "/health/liveness", "port": PORT},
            "periodSeconds": 2,
            "failureThreshold": 60,
        },
        "livenessProbe": {"httpGet": {"path": "/health/liveness", "port": PORT}, "periodSeconds": 20},
        "readinessProbe": {"httpGet": {"path": "/health/readiness", "port": PORT}, "periodSeconds": 5},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_PRE_STOP_SECONDS)]}}},
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
        "securityContext": container_security(),
        "volumeMounts": mounts,
    }
