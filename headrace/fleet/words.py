# SPDX-License-Identifier: Apache-2.0
"""The words of the fleet: a document, a problem with it, and what is known of the cluster around it.

Used by every other module of the room. Views that read one field of a document never raise: what a user wrote may have any
shape until `schema.check` has seen it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

from headrace.version import __version__

Document = Mapping[str, Any]
"""A resource, or a part of one, as JSON has it."""

Made = TypeVar("Made")

NOTHING: Document = {}
"""An empty part. Nobody writes into it."""

DEFAULT_NAMESPACE = "default"

CAPABILITIES = frozenset({"knative", "lws", "keda", "gateway", "ray", "istio"})
"""What a cluster may have beside Kubernetes: Knative Serving, LeaderWorkerSet, KEDA, Gateway API, KubeRay, Istio."""


@dataclass(frozen=True, order=True)
class Problem:
    """One thing to put right in a document."""

    field: str
    """`spec.engine.minReplicas`; "" for the document as a whole."""
    message: str
    """What is wrong."""
    fix: str
    """What to write instead, or to do first."""

    def __str__(self) -> str:
        said = ": ".join(each for each in (self.field, f"{self.message}; {self.fix}") if each)
        # Names come from documents that anybody may have written; a line break in one would forge a second problem.
        return said if said.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in said)


@dataclass(frozen=True)
class FleetSettings:
    """What the operator was told for all services: the ConfigMap `inferenceservice-config` and its own options."""

    default_mode: str = "RawDeployment"
    """`RawDeployment` or `Serverless`: for a service whose shape and annotations say neither."""
    ingress_domain: str = "svc.cluster.local"
    ingress_class: str = "istio"
    domain_template: str = "{{.Name}}.{{.Namespace}}.{{.IngressDomain}}"
    path_template: str = ""
    url_scheme: str = "http"
    additional_domains: tuple[str, ...] = ()
    ingress_gateway: str = ""
    """The Gateway that HTTPRoutes name as their parent: `namespace/name`."""
    disable_ingress_creation: bool = True
    """Then a Service named after the InferenceService is the way in."""
    enable_gateway_api: bool = False
    disable_istio_virtualhost: bool = False
    prometheus_address: str = "http://prometheus-operated.monitoring.svc.cluster.local:9090"
    upstream_selection: bool = False
    """Choose runtimes as OME does, weak points included."""
    migrate_predictor: bool = True
    """Turn `spec.predictor` into engine, model and runtime."""
    node_pinning: Literal["required", "preferred", "none"] = "required"
    """Whether pods go only to nodes that have the model."""
    image: str = f"headrace:{__version__}"
    """Headrace itself, where our router stands before a component."""


@dataclass(frozen=True, eq=False)
class ClusterFacts:
    """What is in the cluster, or in the files that stand for one. Looked up often, so indexed once."""

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
        """The model a service names: that of its namespace before the cluster's.

        `ClusterBaseModel` is also what an absent kind becomes, so it excludes nothing; `BaseModel` somebody wrote, and
        it does.
        """
        own = self._models.get(("BaseModel", namespace, name))
        return own if own is not None or kind == "BaseModel" else self._models.get(("ClusterBaseModel", "", name))

    def runtime(self, namespace: str, name: str, kind: str | None = None) -> Document | None:
        """The runtime a service names: that of its namespace before the cluster's. The kind excludes nothing, as in OME."""
        own = self._runtimes.get(("ServingRuntime", namespace, name))
        return own if own is not None else self._runtimes.get(("ClusterServingRuntime", "", name))

    def weight(self, name: str) -> Document | None:
        """The FineTunedWeight of that name."""
        return self._weights.get(("FineTunedWeight", "", name))

    def accelerator(self, name: str) -> Document | None:
        """The AcceleratorClass of that name."""
        return self._accelerators.get(("AcceleratorClass", "", name))

    def derived(self, make: Callable[[ClusterFacts], Made]) -> Made:
        """What `make` makes of these facts, made once: for indexes that other modules need."""
        if make not in self._derived:
            self._derived[make] = make(self)
        made: Made = self._derived[make]
        return made

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


OF_THE_CLUSTER = frozenset({"ClusterBaseModel", "ClusterServingRuntime", "FineTunedWeight", "AcceleratorClass"})
"""Our kinds that live in no namespace."""


def part(document: Any, *path: str) -> Document:
    """The mapping at a path of names; an empty one where there is none."""
    # Nearly all are dicts, and to ask whether something is a Mapping costs ten times as much.
    for name in path:
        document = document.get(name) if type(document) is dict or isinstance(document, Mapping) else None
    return document if type(document) is dict or isinstance(document, Mapping) else NOTHING


def text(document: Any, *path: str, default: str = "") -> str:
    """The text at a path of names; `default` where there is none, or something else."""
    value = part(document, *path[:-1]).get(path[-1])
    return value if isinstance(value, str) else default


def whole(document: Any, *path: str) -> int | None:
    """The whole number at a path of names, if there is one."""
    value = part(document, *path[:-1]).get(path[-1])
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def items(document: Any, *path: str) -> list[Any]:
    """The list at a path of names; an empty one where there is none."""
    value = part(document, *path[:-1]).get(path[-1])
    return list(value) if isinstance(value, list | tuple) else []


def kind_of(document: Document) -> str:
    """`InferenceService`, ..."""
    return text(document, "kind")


def name_of(document: Document) -> str:
    """The document's name; "" if it has none."""
    return text(document, "metadata", "name")


def namespace_of(document: Document) -> str:
    """The namespace a document lives in; "" for our kinds that live in none."""
    if kind_of(document) in OF_THE_CLUSTER:
        return ""
    return text(document, "metadata", "namespace") or DEFAULT_NAMESPACE


def annotations_of(document: Document) -> dict[str, str]:
    """The annotations that are texts."""
    return {name: value for name, value in part(document, "metadata", "annotations").items() if isinstance(value, str)}


def labels_of(document: Document) -> dict[str, str]:
    """The labels that are texts."""
    return {name: value for name, value in part(document, "metadata", "labels").items() if isinstance(value, str)}


def without_notes(document: Document) -> Document:
    """Without the API server's notes of who set which field, which are longer than the rest."""
    metadata = part(document, "metadata")
    if "managedFields" not in metadata:
        return document
    return {**document, "metadata": {name: each for name, each in metadata.items() if name != "managedFields"}}


def cluster_facts(documents: Iterable[Document], settings: FleetSettings | None = None) -> ClusterFacts:
    """Facts of a heap of documents, for who has files instead of a cluster. Kinds that are no facts are left out."""
    heaps: dict[str, list[Document]] = {"runtimes": [], "models": [], "weights": [], "accelerators": [], "": []}
    for document in documents:
        heaps[_HEAPS.get(kind_of(document), "")].append(document)
    return ClusterFacts(
        runtimes=tuple(heaps["runtimes"]),
        models=tuple(heaps["models"]),
        weights=tuple(heaps["weights"]),
        accelerators=tuple(heaps["accelerators"]),
        settings=settings or FleetSettings(),
    )


_HEAPS = {
    "ServingRuntime": "runtimes",
    "ClusterServingRuntime": "runtimes",
    "BaseModel": "models",
    "ClusterBaseModel": "models",
    "FineTunedWeight": "weights",
    "AcceleratorClass": "accelerators",
}


def _indexed(documents: Iterable[Document]) -> dict[tuple[str, str, str], Document]:
    return {(kind_of(each), namespace_of(each), name_of(each)): each for each in documents}
