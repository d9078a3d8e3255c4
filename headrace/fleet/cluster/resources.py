# SPDX-License-Identifier: Apache-2.0
"""The resource types that the operator reads and writes, and the versions of each that it supports."""

from __future__ import annotations

from headrace.fleet.names import BENCHMARK_LABEL, GROUP, VERSION
from headrace.fleet.planning.shared_activator import MANAGER, SLICE_MANAGER
from headrace.fleet.status.conditions import group_of
from headrace.platforms.kubernetes_client.objects import Document, Resource, kind_of


def _custom_resource(kind: str, plural: str, namespaced: bool = True) -> Resource:
    return Resource(GROUP, (VERSION,), kind, plural, namespaced)


SERVICES = _custom_resource("InferenceService", "inferenceservices")
FACTS = (
    _custom_resource("ServingRuntime", "servingruntimes"),
    _custom_resource("ClusterServingRuntime", "clusterservingruntimes", False),
    _custom_resource("BaseModel", "basemodels"),
    _custom_resource("ClusterBaseModel", "clusterbasemodels", False),
    _custom_resource("FineTunedWeight", "finetunedweights", False),
    _custom_resource("AcceleratorClass", "acceleratorclasses", False),
)
"""Resources that services are planned with."""

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
    Resource("networking.k8s.io", ("v1",), "NetworkPolicy", "networkpolicies"),
    # Those that we write: the others of a Service belong to Kubernetes, and have the labels of the Service.
    Resource(
        "discovery.k8s.io",
        ("v1", "v1beta1"),
        "EndpointSlice",
        "endpointslices",
        selector=f"{SLICE_MANAGER}={MANAGER}",
    ),
    Resource("serving.knative.dev", ("v1",), "Service", "services", capability="knative"),
    Resource("leaderworkerset.x-k8s.io", ("v1",), "LeaderWorkerSet", "leaderworkersets", capability="lws"),
    Resource("keda.sh", ("v1alpha1",), "ScaledObject", "scaledobjects", capability="keda"),
    Resource("gateway.networking.k8s.io", ("v1", "v1beta1"), "HTTPRoute", "httproutes", capability="gateway"),
    Resource("inference.networking.k8s.io", ("v1",), "InferencePool", "inferencepools", capability="inference-pool"),
    Resource(
        "inference.networking.x-k8s.io",
        ("v1alpha2",),
        "InferenceObjective",
        "inferenceobjectives",
        capability="inference-objective",
    ),
    Resource("ray.io", ("v1", "v1alpha1"), "RayCluster", "rayclusters", capability="ray"),
    Resource("networking.istio.io", ("v1", "v1beta1"), "VirtualService", "virtualservices", capability="istio"),
)
"""Resources that `planning` creates for services."""


BENCHMARKS = _custom_resource("BenchmarkJob", "benchmarkjobs")
JOBS = Resource("batch", ("v1",), "Job", "jobs", selector=BENCHMARK_LABEL)
BENCHMARK_PODS = Resource("", ("v1",), "Pod", "pods", selector=BENCHMARK_LABEL)
BENCHMARK_RESOURCES = (BENCHMARKS, JOBS, BENCHMARK_PODS)
"""Resources of benchmarks. The operator reconciles services without them, too."""


def child_resource(document: Document) -> Resource | None:
    """Return the resource type of a planned object."""
    return _CHILDREN.get((group_of(document), kind_of(document)))


_CHILDREN = {(resource.group, resource.kind): resource for resource in CHILDREN}
