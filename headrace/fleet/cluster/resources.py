# SPDX-License-Identifier: Apache-2.0
"""The kinds that the controller reads or writes: where each is found at an API server, and which of its versions will do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.fleet.names import BENCHMARK_LABEL, GROUP, VERSION
from headrace.fleet.status.observed import group_of
from headrace.fleet.words import Document, kind_of


@dataclass(frozen=True)
class Resource:
    """A kind."""

    group: str
    """"": the core."""
    versions: tuple[str, ...]
    """Those whose fields are what we write, the best first."""
    kind: str
    plural: str
    namespaced: bool = True
    capability: str = ""
    """What the cluster has if it has this kind."""
    selector: str = ""
    """A label that those have which matter to us; "": what the view has for all."""


@dataclass(frozen=True)
class Served:
    """A kind, in the version that this API server has."""

    resource: Resource
    version: str

    @property
    def api_version(self) -> str:
        """`apps/v1`, `v1`."""
        return f"{self.resource.group}/{self.version}" if self.resource.group else self.version

    def path(self, namespace: str = "", name: str = "", part: str = "") -> str:
        """Where the objects are, those of one namespace, or one of them."""
        root = f"/apis/{self.resource.group}/{self.version}" if self.resource.group else f"/api/{self.version}"
        space = f"/namespaces/{namespace}" if namespace and self.resource.namespaced else ""
        return "/".join(each for each in (f"{root}{space}/{self.resource.plural}", name, part) if each)


def _ours(kind: str, plural: str, namespaced: bool = True) -> Resource:
    return Resource(GROUP, (VERSION,), kind, plural, namespaced)


SERVICES = _ours("InferenceService", "inferenceservices")
FACTS = (
    _ours("ServingRuntime", "servingruntimes"),
    _ours("ClusterServingRuntime", "clusterservingruntimes", False),
    _ours("BaseModel", "basemodels"),
    _ours("ClusterBaseModel", "clusterbasemodels", False),
    _ours("FineTunedWeight", "finetunedweights", False),
    _ours("AcceleratorClass", "acceleratorclasses", False),
)
"""What services are planned with."""

CHILDREN = (
    Resource("", ("v1",), "Service", "services"),
    Resource("", ("v1",), "ConfigMap", "configmaps"),
    Resource("", ("v1",), "ServiceAccount", "serviceaccounts"),
    Resource("rbac.authorization.k8s.io", ("v1",), "Role", "roles"),
    Resource("rbac.authorization.k8s.io", ("v1",), "RoleBinding", "rolebindings"),
    Resource("apps", ("v1",), "Deployment", "deployments"),
    Resource("autoscaling", ("v2", "v2beta2"), "HorizontalPodAutoscaler", "horizontalpodautoscalers"),
    Resource("policy", ("v1", "v1beta1"), "PodDisruptionBudget", "poddisruptionbudgets"),
    Resource("networking.k8s.io", ("v1",), "Ingress", "ingresses"),
    Resource("serving.knative.dev", ("v1",), "Service", "services", capability="knative"),
    Resource("leaderworkerset.x-k8s.io", ("v1",), "LeaderWorkerSet", "leaderworkersets", capability="lws"),
    Resource("keda.sh", ("v1alpha1",), "ScaledObject", "scaledobjects", capability="keda"),
    Resource("gateway.networking.k8s.io", ("v1", "v1beta1"), "HTTPRoute", "httproutes", capability="gateway"),
    Resource("ray.io", ("v1", "v1alpha1"), "RayCluster", "rayclusters", capability="ray"),
    Resource("networking.istio.io", ("v1", "v1beta1"), "VirtualService", "virtualservices", capability="istio"),
)
"""What is made of services: every kind that `planning` writes."""

PODS = Resource("", ("v1",), "Pod", "pods")

BENCHMARKS = _ours("BenchmarkJob", "benchmarkjobs")
JOBS = Resource("batch", ("v1",), "Job", "jobs", selector=BENCHMARK_LABEL)
BENCHMARK_PODS = Resource("", ("v1",), "Pod", "pods", selector=BENCHMARK_LABEL)
MEASURING = (BENCHMARKS, JOBS, BENCHMARK_PODS)
"""What benchmarks need. Services are looked at without them, too."""
SETTINGS = Resource("", ("v1",), "ConfigMap", "configmaps")
EVENTS = Served(Resource("", ("v1",), "Event", "events"), "v1")
LEASES = Served(Resource("coordination.k8s.io", ("v1",), "Lease", "leases"), "v1")


def child_of(document: Document) -> Resource | None:
    """The kind of an object that a plan has."""
    return _CHILDREN.get((group_of(document), kind_of(document)))


def served(resources: Iterable[Resource], offered: Mapping[str, frozenset[str]]) -> dict[Resource, Served]:
    """Those that an API server has, given the plurals of each of its API versions."""
    found: dict[Resource, Served] = {}
    for resource in resources:
        for version in resource.versions:
            candidate = Served(resource, version)
            if resource.plural in offered.get(candidate.api_version, ()):
                found[resource] = candidate
                break
    return found


_CHILDREN = {(each.group, each.kind): each for each in CHILDREN}
