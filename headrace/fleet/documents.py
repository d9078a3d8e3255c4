# SPDX-License-Identifier: Apache-2.0
"""The fleet's basic types: a problem with a document, the settings of the fleet, and the facts of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

from headrace.fleet.names import NAMESPACE
from headrace.platforms.kubernetes_client.objects import Document, get_str, kind_of, name_of
from headrace.version import __version__

Derived = TypeVar("Derived")

DEFAULT_NAMESPACE = "default"

CAPABILITIES = frozenset({"knative", "lws", "keda", "gateway", "ray", "istio", "inference-pool", "inference-objective"})
"""Optional features of a cluster: Knative Serving, LeaderWorkerSet, KEDA, Gateway API, KubeRay, Istio, and the two kinds of
the Gateway API Inference Extension."""


@dataclass(frozen=True, order=True)
class Problem:
    """One problem of a document, and how to fix it."""

    field: str
    """`spec.engine.minReplicas`; "" for the document as a whole."""
    message: str
    """What is wrong."""
    fix: str
    """What to write instead, or to do first."""

    def __str__(self) -> str:
        text = ": ".join(part for part in (self.field, f"{self.message}; {self.fix}") if part)
        # Names come from users' documents: a line break in one would forge a second problem.
        return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@dataclass(frozen=True)
class FleetSettings:
    """Settings for all services: the ConfigMap `inferenceservice-config` and the operator's options."""

    default_mode: str = "RawDeployment"
    """`RawDeployment` or `Serverless`, for a service that chooses neither."""
    ingress_domain: str = "svc.cluster.local"
    ingress_class: str = "istio"
    domain_template: str = "{{.Name}}.{{.Namespace}}.{{.IngressDomain}}"
    path_template: str = ""
    url_scheme: str = "http"
    additional_domains: tuple[str, ...] = ()
    ingress_gateway: str = ""
    """Parent Gateway of HTTPRoutes: `namespace/name`."""
    disable_ingress_creation: bool = True
    """With True, a Service named after the InferenceService is its entry point."""
    enable_gateway_api: bool = False
    disable_istio_virtualhost: bool = False
    prometheus_address: str = "http://prometheus-operated.monitoring.svc.cluster.local:9090"
    upstream_selection: bool = False
    """Select runtimes exactly as OME does, including its known faults."""
    migrate_predictor: bool = True
    """Turn `spec.predictor` into engine, model and runtime."""
    node_pinning: Literal["required", "preferred", "none"] = "required"
    """Whether pods run only on nodes that have the model."""
    pre_stop_seconds: int = 5
    """How long a pod keeps serving after its deletion, before SIGTERM: meanwhile kube-proxy and routers remove it."""
    pod_security: Literal["restricted", "compatible", "unchanged"] = "compatible"
    """Privileges that pods drop. `restricted`: as the Pod Security Standard of that name; `compatible`: the same, but images
    other than Headrace's may run as root; `unchanged`: none."""
    isolate_services: bool = False
    """Whether services have NetworkPolicies."""
    client_namespaces: tuple[str, ...] = ()
    """Namespaces whose pods may connect to all pods of isolated services."""
    own_namespace: str = NAMESPACE
    """The operator's namespace."""
    image: str = f"headrace:{__version__}"
    """The image of front routers."""


@dataclass(frozen=True, eq=False)
class ClusterFacts:
    """The resources that services are planned with, from a cluster or from files. Indexed once."""

    runtimes: tuple[Document, ...] = ()
    """ServingRuntime and ClusterServingRuntime."""
    models: tuple[Document, ...] = ()
    """BaseModel and ClusterBaseModel."""
    weights: tuple[Document, ...] = ()
    """FineTunedWeight."""
    accelerators: tuple[Document, ...] = ()
    """AcceleratorClass."""
    capabilities: frozenset[str] = CAPABILITIES
    settings: FleetSettings = field(default_factory=FleetSettings)

    def model(self, namespace: str, name: str, kind: str | None = None) -> Document | None:
        """Return the model that a service names, in its namespace first, then cluster-wide.

        `ClusterBaseModel` is also the default kind, so it excludes nothing; an explicit `BaseModel` excludes the others.
        """
        own = self._models.get(("BaseModel", namespace, name))
        return own if own is not None or kind == "BaseModel" else self._models.get(("ClusterBaseModel", "", name))

    def runtime(self, namespace: str, name: str, kind: str | None = None) -> Document | None:
        """Return the runtime that a service names, in its namespace first. The kind excludes nothing, as in OME."""
        own = self._runtimes.get(("ServingRuntime", namespace, name))
        return own if own is not None else self._runtimes.get(("ClusterServingRuntime", "", name))

    def weight(self, name: str) -> Document | None:
        """Return the FineTunedWeight of that name."""
        return self._weights.get(("FineTunedWeight", "", name))

    def accelerator(self, name: str) -> Document | None:
        """Return the AcceleratorClass of that name."""
        return self._accelerators.get(("AcceleratorClass", "", name))

    def derived(self, make: Callable[[ClusterFacts], Derived]) -> Derived:
        """Return `make(self)`, computed once: for indexes of other modules."""
        if make not in self._derived:
            self._derived[make] = make(self)
        derived: Derived = self._derived[make]
        return derived

    @cached_property
    def _derived(self) -> dict[Callable[[ClusterFacts], Any], Any]:
        return {}

    @cached_property
    def _models(self) -> dict[tuple[str, str, str], Document]:
        return _indexed(self.models)

    @cached_property
    def _runtimes(self) -> dict[tuple[str, str, str], Document]:
        return _indexed(self.runtimes)

    @cached_property
    def _weights(self) -> dict[tuple[str, str, str], Document]:
        return _indexed(self.weights)

    @cached_property
    def _accelerators(self) -> dict[tuple[str, str, str], Document]:
        return _indexed(self.accelerators)


CLUSTER_SCOPED_KINDS = frozenset({"ClusterBaseModel", "ClusterServingRuntime", "FineTunedWeight", "AcceleratorClass"})
"""Our cluster-scoped kinds."""


def object_key(document: Document) -> tuple[str, str]:
    """Return the namespace and the name of an object."""
    return get_str(document, "metadata", "namespace"), name_of(document)


def resource_version(document: Document) -> str:
    """Return the version of an object, which changes with every write."""
    return get_str(document, "metadata", "resourceVersion")


def kind_key(document: Document) -> tuple[str, str, str]:
    """Return the kind, the namespace ("" for our cluster-scoped kinds) and the name of a document."""
    return kind_of(document), namespace_of(document), name_of(document)


def namespace_of(document: Document) -> str:
    """Return the namespace of a document; "" for our cluster-scoped kinds."""
    if kind_of(document) in CLUSTER_SCOPED_KINDS:
        return ""
    return get_str(document, "metadata", "namespace") or DEFAULT_NAMESPACE


def cluster_facts(documents: Iterable[Document], settings: FleetSettings | None = None) -> ClusterFacts:
    """Build facts from documents, such as those of files. Documents of other kinds are ignored."""
    groups: dict[str, list[Document]] = {"runtimes": [], "models": [], "weights": [], "accelerators": [], "": []}
    for document in documents:
        groups[_FACT_KINDS.get(kind_of(document), "")].append(document)
    return ClusterFacts(
        runtimes=tuple(groups["runtimes"]),
        models=tuple(groups["models"]),
        weights=tuple(groups["weights"]),
        accelerators=tuple(groups["accelerators"]),
        settings=settings or FleetSettings(),
    )


_FACT_KINDS = {
    "ServingRuntime": "runtimes",
    "ClusterServingRuntime": "runtimes",
    "BaseModel": "models",
    "ClusterBaseModel": "models",
    "FineTunedWeight": "weights",
    "AcceleratorClass": "accelerators",
}


def _indexed(documents: Iterable[Document]) -> dict[tuple[str, str, str], Document]:
    return {kind_key(document): document for document in documents}
