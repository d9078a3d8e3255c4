# SPDX-License-Identifier: Apache-2.0
"""Settings of the driver `kubernetes`: the cluster, and the pods of services."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.core.errors import InvalidArgument

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_OBJECT = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_PATH = re.compile(r"/[A-Za-z0-9._~/-]*")
_LABEL = re.compile(r"[A-Za-z0-9._/-]{0,316}")

_PROBES = "/api/v1/health/"


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    """A cluster and a namespace, and the objects of services."""

    kubeconfig: str = ""
    """Paths joined by ":"; the first that exists is used. "": the pod's service account, else `~/.kube/config`."""
    context: str = ""
    """"": the current context."""
    namespace: str = "default"
    workload: Literal["job", "statefulset"] = "job"
    """A Job ends with its program; a StatefulSet restarts it."""
    service_type: Literal["LoadBalancer", "NodePort", "ClusterIP"] = "LoadBalancer"
    """`ClusterIP` is reachable inside the cluster only."""
    node_host: str = ""
    """For NodePort: the host name of nodes; "": the address of the pod's node."""
    image_pull_secret: str = ""
    service_account: str = ""
    shm_size: str = "16Gi"
    """Maximum size of /dev/shm; "": the runtime's default of 64 MiB."""
    cpu: str = ""
    memory: str = ""
    """Request, and for memory the limit too; "": the namespace's default."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    ttl_seconds: int = 3600
    """How long a finished Job is kept."""
    grace_seconds: int = 30
    startup_seconds: int = 600
    """Timeout until a service listens; loading its model may take longer."""
    liveness_path: str = _PROBES + "liveness"
    readiness_path: str = _PROBES + "readiness"
    """Paths of the probes; "": probe the port only."""
    restricted: bool = False
    """Whether pods meet the Pod Security Standard `restricted`; images that run as root do not start then."""
    ptrace: bool = False
    """Whether to add SYS_PTRACE, for profilers: refused where a Pod Security Standard is enforced."""
    check_gpus: bool = True
    """Whether to refuse a service that needs more GPUs than any node has; disable it if nodes are created on demand."""
    request_seconds: float = 30.0
    delete_seconds: float = 120.0
    """Timeout of a deletion, after the grace period."""

    def __post_init__(self) -> None:
        """Raise InvalidArgument for values that no cluster accepts."""
        _check_pattern("namespace", self.namespace, _NAME)
        for name in ("image_pull_secret", "service_account"):
            if getattr(self, name):
                _check_pattern(name, getattr(self, name), _OBJECT)
        for name in ("shm_size", "cpu", "memory"):
            if getattr(self, name):
                _check_pattern(name, getattr(self, name), _QUANTITY)
        for path in (self.liveness_path, self.readiness_path):
            if path:
                _check_pattern("a probe's path", path, _PATH)
        for key, value in self.node_selector.items():
            _check_pattern("node_selector", key, _LABEL)
            _check_pattern("node_selector", value, _LABEL)
        _check_choice("workload", self.workload, ("job", "statefulset"))
        _check_choice("service_type", self.service_type, ("LoadBalancer", "NodePort", "ClusterIP"))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **given: Any) -> KubernetesSettings:
        """Read the variables of TAO and kubectl; `given` overrides them."""
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {
            "kubeconfig": environ.get("KUBECONFIG", ""),
            "context": environ.get("TAO_K8S_CONTEXT", ""),
            "namespace": environ.get("TAO_K8S_NAMESPACE", "") or "default",
            "image_pull_secret": environ.get("IMAGEPULLSECRET", ""),
            "check_gpus": environ.get("TAO_K8S_SKIP_NODE_RUNTIME_CHECK", "").lower() not in ("1", "true", "yes"),
        }
        return cls(**{**values, **{name: value for name, value in given.items() if value is not None}})


def _check_pattern(name: str, text: str, pattern: re.Pattern[str]) -> None:
    if not pattern.fullmatch(text):
        raise InvalidArgument(f"{name} {text!a} is not valid: Kubernetes needs the form {pattern.pattern}")


def _check_choice(name: str, text: str, choices: tuple[str, ...]) -> None:
    if text not in choices:
        raise InvalidArgument(f"{name} {text!a} is unknown: use one of {', '.join(choices)}")
