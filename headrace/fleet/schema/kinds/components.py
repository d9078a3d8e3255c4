# SPDX-License-Identifier: Apache-2.0
"""Engine, decoder and router: the same rows in an InferenceService and, as `engineConfig` and the like, in a runtime."""

from __future__ import annotations

from headrace.fleet.schema.fields import INT64, Field, choice, mapping, number, record, share, text, texts, truth, whole
from headrace.fleet.schema.kinds.pods import POD, RUNNER

POLICIES = ("BestFit", "Cheapest", "MostCapable", "FirstAvailable")
OPERATORS = ("GreaterThan", "GreaterThanOrEqual", "LessThan", "LessThanOrEqual")

KEDA = record(
    "kedaConfig",
    "Autoscaling by KEDA.",
    truth("enableKeda", "Scale by KEDA."),
    text(
        "promServerAddress", "URL of the Prometheus server.", pattern=r"https?://[^\s/]+.*", example="http://prom:9090"
    ),
    text("customPromQuery", "Query to scale by; every %s becomes the full name of the component, NAME-engine."),
    text(
        "scalingThreshold",
        "What the query is compared with.",
        pattern=r"[+-]?[0-9]*\.?[0-9]+([eE][+-]?[0-9]+)?",
        example='"0.5"',
    ),
    choice("scalingOperator", "How it is compared.", *OPERATORS),
    record(
        "authenticationRef",
        "Credentials for Prometheus.",
        text("name", "Name of the TriggerAuthentication.", required=True),
        choice("kind", "", "TriggerAuthentication", "ClusterTriggerAuthentication", default="TriggerAuthentication"),
    ),
    text("authModes", "How KEDA shows them: a comma list of basic, tls, bearer, custom."),
)

CONSTRAINTS = record(
    "constraints",
    "What an accelerator must have.",
    whole("minMemory", "GB.", least=0, most=INT64),
    whole("maxMemory", "GB.", least=0, most=INT64),
    number("minComputePerformanceTFLOPS", "", least=0),
    text("minArchitectureVersion", 'Compute capability, "9.0".'),
    texts("requiredFeatures"),
    texts("excludedClasses", "Classes never taken."),
    texts("architectureFamilies", "`vendor-family` or `family`."),
    texts("preferredPrecisions"),
)

ACCELERATOR_SELECTOR = record(
    "acceleratorSelector",
    "Which accelerators to run on.",
    text("acceleratorClass", "Name of the AcceleratorClass."),
    CONSTRAINTS,
    choice("policy", "How to choose among several.", *POLICIES),
)

EXTENSION: tuple[Field, ...] = (
    whole("minReplicas", "Least number of replicas; 0 scales to zero.", least=0),
    whole("maxReplicas", "Largest number of replicas.", least=1),
    choice("scaleMetric", "What to scale by.", "cpu", "memory", "concurrency", "rps"),
    whole("scaleTarget", "Value of the metric to hold: percent for cpu and memory.", least=1),
    whole("containerConcurrency", "Requests at a time in one container; 0 is no limit.", least=0, most=INT64),
    whole("timeoutSeconds", "Longest time a request may take.", least=1, most=INT64),
    whole("canaryTrafficPercent", "Share of the requests that the newest revision gets.", least=0, most=100),
    mapping("labels", "For the pods and all objects."),
    mapping("annotations", "For the pods and all objects."),
    share("minAvailable", "Pods that stay up while nodes are drained."),
    share("maxUnavailable", "Pods that may be down while nodes are drained."),
    record(
        "deploymentStrategy",
        "How pods are replaced (RawDeployment).",
        choice("type", "", "RollingUpdate", "Recreate"),
        record("rollingUpdate", "", share("maxSurge"), share("maxUnavailable")),
    ),
    KEDA,
)
"""How a component scales and is replaced."""

LEADER = record("leader", "The first node of a group (MultiNode).", *POD, RUNNER)
WORKER = record(
    "worker",
    "The other nodes of a group (MultiNode).",
    *POD,
    whole("size", "Number of workers, the leader not counted.", least=0),
    RUNNER,
)


def served(name: str, says: str) -> Field:
    """An engine or a decoder."""
    override = record("acceleratorOverride", "In place of the service's.", *ACCELERATOR_SELECTOR.fields)
    return record(name, says, *POD, *EXTENSION, RUNNER, LEADER, WORKER, override)


def routed(name: str, says: str) -> Field:
    """A router."""
    return record(name, says, *POD, *EXTENSION, RUNNER, mapping("config", "Settings of the router."))
