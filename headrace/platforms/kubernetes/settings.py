# SPDX-License-Identifier: Apache-2.0
"""What a user may say about the cluster and about the pods that are made on it. Read by the driver and the manifests."""

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
    """A cluster and a namespace, and how services look there."""

    kubeconfig: str = ""
    """Its path, or several joined by ":", of which the first that exists counts. "": in a pod its service account, else
    `~/.kube/config`."""
    context: str = ""
    """"": the kubeconfig's own."""
    namespace: str = "default"
    workload: Literal["job", "statefulset"] = "job"
    """A Job ends when its program ends; a StatefulSet starts it again, and again."""
    service_type: Literal["LoadBalancer", "NodePort", "ClusterIP"] = "LoadBalancer"
    """`ClusterIP` can be reached from inside of the cluster alone."""
    node_host: str = ""
    """For NodePort: how nodes are reached; "": by the address of the node that the pod runs on."""
    image_pull_secret: str = ""
    service_account: str = ""
    shm_size: str = "16Gi"
    """The most that /dev/shm may take of the pod's memory; "": no /dev/shm but the runtime's own 64 MiB."""
    cpu: str = ""
    memory: str = ""
    """Requested, and for memory the limit too; "": what the namespace gives."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    ttl_seconds: int = 3600
    """How long a Job that has ended can be looked at."""
    grace_seconds: int = 30
    startup_seconds: int = 600
    """How long a service may take until it listens; loading its model may take longer."""
    liveness_path: str = _PROBES + "liveness"
    readiness_path: str = _PROBES + "readiness"
    """Where the service says so itself; "": that its port is open is all there is to know."""
    restricted: bool = False
    """As the Pod Security Standard `restricted` demands; images that run as root do not start then."""
    ptrace: bool = False
    """SYS_PTRACE, for profilers: pods with it are refused where a Pod Security Standard is enforced."""
    check_gpus: bool = True
    """Refuse to start what no node's GPUs could take; not where nodes are only made when they are needed."""
    request_seconds: float = 30.0
    delete_seconds: float = 120.0
    """How long to wait, beyond the grace, until nothing of a service is left."""

    def __post_init__(self) -> None:
        """Refuse what no cluster would take."""
        _fits("namespace", self.namespace, _NAME)
        for name in ("image_pull_secret", "service_account"):
            if getattr(self, name):
                _fits(name, getattr(self, name), _OBJECT)
        for name in ("shm_size", "cpu", "memory"):
            if getattr(self, name):
                _fits(name, getattr(self, name), _QUANTITY)
        for path in (self.liveness_path, self.readiness_path):
            if path:
                _fits("a probe's path", path, _PATH)
        for key, value in self.node_selector.items():
            _fits("node_selector", key, _LABEL)
            _fits("node_selector", value, _LABEL)
        _one_of("workload", self.workload, ("job", "statefulset"))
        _one_of("service_type", self.service_type, ("LoadBalancer", "NodePort", "ClusterIP"))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **given: Any) -> KubernetesSettings:
        """What is given, and for the rest the variables that TAO and kubectl know."""
        environ = os.environ if environ is None else environ
        found: dict[str, Any] = {
            "kubeconfig": environ.get("KUBECONFIG", ""),
            "context": environ.get("TAO_K8S_CONTEXT", ""),
            "namespace": environ.get("TAO_K8S_NAMESPACE", "") or "default",
            "image_pull_secret": environ.get("IMAGEPULLSECRET", ""),
            "check_gpus": environ.get("TAO_K8S_SKIP_NODE_RUNTIME_CHECK", "").lower() not in ("1", "true", "yes"),
        }
        return cls(**{**found, **{name: value for name, value in given.items() if value is not None}})


def _fits(name: str, text: str, pattern: re.Pattern[str]) -> None:
    if not pattern.fullmatch(text):
        raise InvalidArgument(f"{name} {text!a} is nothing that Kubernetes takes: it has the form {pattern.pattern}")


def _one_of(name: str, text: str, known: tuple[str, ...]) -> None:
    if text not in known:
        raise InvalidArgument(f"{name} {text!a} is not known: it is one of {', '.join(known)}")
