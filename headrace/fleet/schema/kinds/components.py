# SPDX-License-Identifier: Apache-2.0
"""Tables of engine, decoder and router, in an InferenceService and in a runtime, and of their pods and containers."""

from __future__ import annotations

from headrace.fleet.names import MAIN_CONTAINER
from headrace.fleet.schema.fields import (
    INT64,
    LABEL,
    Field,
    any_value,
    boolean,
    choice,
    int_or_percent,
    integer,
    list_of,
    mapping,
    number,
    quantity,
    record,
    string,
    strings,
)

RESOURCES = record(
    "resources",
    "CPU, memory and accelerators.",
    mapping("requests", "", quantity("")),
    mapping("limits", "", quantity("")),
    unchecked=("claims",),
)

ENV = list_of(
    "env",
    "Environment variables.",
    record(
        "",
        "",
        string("name", required=True, pattern=r"[^=]+", example="MODEL_PATH"),
        string("value"),
        any_value("valueFrom"),
    ),
)

MOUNTS = list_of(
    "volumeMounts",
    "Where volumes are mounted.",
    record(
        "",
        "",
        string("name", required=True),
        string("mountPath", required=True),
        boolean("readOnly"),
        string("subPath"),
        unchecked=("subPathExpr", "mountPropagation", "recursiveReadOnly"),
    ),
)

PORTS = list_of(
    "ports",
    "Ports the container listens on.",
    record(
        "",
        "",
        string("name"),
        integer("containerPort", minimum=1, maximum=65535, required=True),
        integer("hostPort", minimum=0, maximum=65535),
        choice("protocol", "", "TCP", "UDP", "SCTP"),
        unchecked=("hostIP",),
    ),
)


def probe(name: str) -> Field:
    """Return the fields of a probe that a local fleet reads; the kubelet reads all."""
    return record(
        name,
        "",
        integer("initialDelaySeconds", minimum=0),
        integer("periodSeconds", minimum=1),
        integer("timeoutSeconds", minimum=1),
        integer("successThreshold", minimum=1),
        integer("failureThreshold", minimum=1),
        own_checks=True,
        open=True,
    )


def container_fields(*, needs_name: bool) -> tuple[Field, ...]:
    """Return the fields of a container. A runner needs no name: it is the main container."""
    return (
        string(
            "name", "Name of the container.", required=needs_name, max_length=63, pattern=LABEL, example=MAIN_CONTAINER
        ),
        string("image", "Image to run."),
        choice("imagePullPolicy", "", "Always", "Never", "IfNotPresent"),
        strings("command", "Command, instead of the image's."),
        strings("args", "Arguments."),
        string("workingDir"),
        ENV,
        list_of("envFrom", "", record("", "")),
        RESOURCES,
        MOUNTS,
        PORTS,
        probe("livenessProbe"),
        probe("readinessProbe"),
        probe("startupProbe"),
        record("lifecycle", ""),
        record("securityContext", ""),
        boolean("stdin"),
        boolean("tty"),
        string("terminationMessagePath"),
        choice("terminationMessagePolicy", "", "File", "FallbackToLogsOnError"),
    )


MORE_CONTAINER_FIELDS = ("stdinOnce", "volumeDevices", "resizePolicy", "restartPolicy", "restartPolicyRules")
"""The other fields of a container in Kubernetes 1.34."""
CONTAINER = record("", "", *container_fields(needs_name=True), own_checks=True, unchecked=MORE_CONTAINER_FIELDS)
RUNNER = record(
    "runner",
    "The main container. Merged with the runtime's.",
    *container_fields(needs_name=False),
    unchecked=MORE_CONTAINER_FIELDS,
)

_TOLERATION = record(
    "", "", string("key"), string("operator"), string("effect"), unchecked=("value", "tolerationSeconds")
)

POD_FIELDS: tuple[Field, ...] = (
    string("serviceAccountName", "Service account of the pods."),
    mapping("nodeSelector", "Required node labels."),
    list_of("tolerations", "Tolerated taints.", _TOLERATION),
    record("affinity", "Affinity and anti-affinity of the pods."),
    list_of("volumes", "Additional volumes.", record("", "", string("name", required=True), open=True)),
    list_of("containers", "Additional containers.", CONTAINER),
    list_of("initContainers", "Containers that run before the others.", CONTAINER),
    list_of("imagePullSecrets", "Secrets for registries.", record("", "", string("name"))),
    string("schedulerName"),
    string("priorityClassName"),
    string("runtimeClassName"),
    string("hostname"),
    string("subdomain"),
    string("nodeName"),
    choice("restartPolicy", "", "Always", "OnFailure", "Never"),
    choice("dnsPolicy", "", "ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    record("dnsConfig", ""),
    boolean("hostNetwork"),
    boolean("hostIPC"),
    boolean("hostPID"),
    boolean("shareProcessNamespace"),
    boolean("automountServiceAccountToken"),
    boolean("enableServiceLinks"),
    integer("terminationGracePeriodSeconds", minimum=0),
    integer("activeDeadlineSeconds", minimum=1),
    record("securityContext", ""),
    list_of("hostAliases", "", record("", "", string("ip", required=True), strings("hostnames"))),
    list_of(
        "topologySpreadConstraints",
        "",
        record("", "", string("topologyKey"), integer("maxSkew", minimum=1), open=True),
    ),
)
"""Fields of a pod spec, as part of a component. `containers` may be absent."""
MORE_POD_FIELDS = (
    "serviceAccount",
    "setHostnameAsFQDN",
    "hostUsers",
    "hostnameOverride",
    "priority",
    "preemptionPolicy",
    "overhead",
    "readinessGates",
    "schedulingGates",
    "resourceClaims",
    "resources",
    "os",
)
"""The other fields of a pod spec in Kubernetes 1.34. A component's `resources` are those of its runner."""
POLICIES = ("BestFit", "Cheapest", "MostCapable", "FirstAvailable")
OPERATORS = ("GreaterThan", "GreaterThanOrEqual", "LessThan", "LessThanOrEqual")

KEDA = record(
    "kedaConfig",
    "Autoscaling by KEDA.",
    boolean("enableKeda", "Enable KEDA."),
    string(
        "promServerAddress", "URL of the Prometheus server.", pattern=r"https?://[^\s/]+.*", example="http://prom:9090"
    ),
    string("customPromQuery", "Query to scale by; every %s becomes the full name of the component, NAME-engine."),
    string(
        "scalingThreshold",
        "Threshold of the query.",
        pattern=r"[+-]?[0-9]*\.?[0-9]+([eE][+-]?[0-9]+)?",
        example='"0.5"',
    ),
    choice("scalingOperator", "Comparison operator.", *OPERATORS),
    record(
        "authenticationRef",
        "Credentials for Prometheus.",
        string("name", "Name of the TriggerAuthentication.", required=True),
        choice("kind", "", "TriggerAuthentication", "ClusterTriggerAuthentication", default="TriggerAuthentication"),
    ),
    string("authModes", "Authentication modes of KEDA: a comma list of basic, tls, bearer, custom."),
)

AUTOSCALER_CLASSES = ("HPA", "KEDA", "External", "None")

AUTOSCALER = record(
    "autoscaler",
    "Autoscaling as in OME 1.3. It replaces scaleMetric, scaleTarget and kedaConfig.",
    choice(
        "class",
        "HPA or KEDA; External: an autoscaler of your own; None: always minReplicas.",
        *AUTOSCALER_CLASSES,
        required=True,
    ),
    record(
        "hpa",
        "For HPA: copied to the HorizontalPodAutoscaler (autoscaling/v2).",
        list_of("metrics", "Metrics; default: 80 % of the requested CPU.", record("", "")),
        any_value("behavior", "How fast it scales."),
    ),
    record(
        "keda",
        "For KEDA: copied to the ScaledObject.",
        list_of("triggers", "Triggers; at least one.", record("", ""), required=True),
        integer("pollingInterval", "Seconds between polls of the triggers.", minimum=1),
        integer("cooldownPeriod", "Seconds without activity before it scales to zero.", minimum=0),
        integer("idleReplicaCount", "Replicas while no trigger is active; less than minReplicas.", minimum=0),
        any_value("fallback", "Replicas while triggers fail."),
        any_value("advanced", "Further settings of the ScaledObject."),
    ),
)

CONSTRAINTS = record(
    "constraints",
    "Required properties of an accelerator.",
    integer("minMemory", "GB.", minimum=0, maximum=INT64),
    integer("maxMemory", "GB.", minimum=0, maximum=INT64),
    number("minComputePerformanceTFLOPS", "", minimum=0),
    string("minArchitectureVersion", 'Compute capability, "9.0".'),
    strings("requiredFeatures"),
    strings("excludedClasses", "Classes to exclude."),
    strings("architectureFamilies", "`vendor-family` or `family`."),
    strings("preferredPrecisions"),
)

ACCELERATOR_SELECTOR = record(
    "acceleratorSelector",
    "Which accelerators to run on.",
    string("acceleratorClass", "Name of the AcceleratorClass."),
    CONSTRAINTS,
    choice("policy", "How to choose among several.", *POLICIES),
)

SLO = record(
    "slo",
    "Latency targets to scale by, an extension of Headrace: OME has no such field (annotation: ome.io/slo).",
    number("ttftMilliseconds", "Time to the first token of a stream.", minimum=1),
    number("tpotMilliseconds", "Time per further token.", minimum=1),
    number("percentile", "Percentile that is kept below the targets; default 95.", minimum=50, maximum=99.9),
)
"""Targets of a service, or of a component."""

SCALING_FIELDS: tuple[Field, ...] = (
    integer("minReplicas", "Minimum number of replicas; 0 scales to zero.", minimum=0),
    integer("maxReplicas", "Maximum number of replicas.", minimum=1),
    choice("scaleMetric", "Metric to scale by.", "cpu", "memory", "concurrency", "rps"),
    integer("scaleTarget", "Target value of the metric: percent for cpu and memory.", minimum=1),
    integer("containerConcurrency", "Concurrent requests per container; 0: unlimited.", minimum=0, maximum=INT64),
    integer("timeoutSeconds", "Maximum duration of a request.", minimum=1, maximum=INT64),
    integer(
        "canaryTrafficPercent", "Share of the requests for the newest revision, in percent.", minimum=0, maximum=100
    ),
    mapping("labels", "Added to the pods and all objects."),
    mapping("annotations", "Added to the pods and all objects."),
    int_or_percent("minAvailable", "Pods that stay available while nodes are drained."),
    int_or_percent("maxUnavailable", "Pods that may be unavailable while nodes are drained."),
    record(
        "deploymentStrategy",
        "Update strategy of the pods (RawDeployment).",
        choice("type", "", "RollingUpdate", "Recreate"),
        record("rollingUpdate", "", int_or_percent("maxSurge"), int_or_percent("maxUnavailable")),
    ),
    KEDA,
    AUTOSCALER,
)
"""How a component scales and is updated."""

LEADER = record("leader", "The first node of a group (MultiNode).", *POD_FIELDS, RUNNER, unchecked=MORE_POD_FIELDS)
WORKER = record(
    "worker",
    "The other nodes of a group (MultiNode).",
    *POD_FIELDS,
    integer("size", "Number of workers, without the leader.", minimum=0),
    RUNNER,
    unchecked=MORE_POD_FIELDS,
)


def model_component(name: str, description: str) -> Field:
    """Return the field of an engine or a decoder."""
    override = record("acceleratorOverride", "Overrides that of the service.", *ACCELERATOR_SELECTOR.fields)
    rows = (*POD_FIELDS, *SCALING_FIELDS, SLO, RUNNER, LEADER, WORKER, override)
    return record(name, description, *rows, unchecked=MORE_POD_FIELDS)


def router_component(name: str, description: str) -> Field:
    """Return the field of a router."""
    rows = (*POD_FIELDS, *SCALING_FIELDS, RUNNER, mapping("config", "Settings of the router."))
    return record(name, description, *rows, unchecked=MORE_POD_FIELDS)
