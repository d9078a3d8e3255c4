# SPDX-License-Identifier: Apache-2.0
"""Names of objects, labels and annotations, the same as OME's, so that existing selectors and dashboards work."""

from __future__ import annotations

import hashlib

GROUP = "ome.io"
VERSION = "v1beta1"
API_VERSION = f"{GROUP}/{VERSION}"
SERVICE = "InferenceService"
"""The kind of a service."""
NAMESPACE = "headrace-system"
"""Default namespace of the installation."""

COMPONENTS = ("engine", "decoder", "router")
"""In the order they are created."""

ENGINE, DECODER, ROUTER = COMPONENTS

# Modes of a component or a service.
RAW = "RawDeployment"
SERVERLESS = "Serverless"
MULTI_NODE = "MultiNode"
MULTI_NODE_RAY = "MultiNodeRayVLLM"
PD_DISAGGREGATED = "PDDisaggregated"
VIRTUAL = "VirtualDeployment"
MODES = (SERVERLESS, RAW, MULTI_NODE_RAY, MULTI_NODE, VIRTUAL, PD_DISAGGREGATED)

# Containers.
MAIN_CONTAINER = "ome-container"
ROUTER_CONTAINER = "router"

OPERATOR = "headrace-operator"
"""Name of the operator: its Deployment, its ServiceAccount and the label of its pods."""
ACTIVATOR = "headrace-activator"
"""Name of the shared activator: its Deployment, its ServiceAccount and the label of its pods."""

# Labels.
APP_NAME_LABEL = "app.kubernetes.io/name"
SERVICE_LABEL = "ome.io/inferenceservice"
COMPONENT_LABEL = "component"
APP_LABEL = "app"
EXTERNAL_SERVICE = "external-service"
RUNTIME_LABEL = "serving-runtime"
FINE_TUNED_LABEL = "fine-tuned-serving"
MERGED_WEIGHTS_LABEL = "fine-tuned-serving-with-merged-weights"
FT_STRATEGY_LABEL = "fine-tuned-weight-ft-strategy"
BASE_MODEL_NAME_LABEL = "base-model-name"
BASE_MODEL_SIZE_LABEL = "base-model-size"
BASE_MODEL_TYPE_LABEL = "base-model-type"
BASE_MODEL_VENDOR_LABEL = "base-model-vendor"
VISIBILITY_LABEL = "networking.knative.dev/visibility"
CLUSTER_LOCAL = "cluster-local"
VOLCANO_QUEUE_LABEL = "volcano.sh/queue-name"
KUEUE_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
KUEUE_PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
BENCHMARK_LABEL = "benchmark"
"""Label of the Job of a BenchmarkJob and of its pod: the name of the BenchmarkJob."""

# Annotations of a service.
DEPLOYMENT_MODE = "ome.io/deploymentMode"
OME_NATIVE = "OMENative"
"""OME's own workload, as a mode of a component or a service: here a Deployment or a LeaderWorkerSet."""
AUTOSCALER_CLASS = "ome.io/autoscalerClass"
SLO = "ome.io/slo"
INFERENCE_POOL = "ome.io/inference-pool"
"""Gateways choose the pods of the service: by a policy of our router, or "true"."""
INFERENCE_OBJECTIVES = "ome.io/inference-objectives"
"""Priorities of requests that a gateway sends: `interactive=10,batch=-10`."""
AUTOSCALER_METRICS = "ome.io/metrics"
TARGET_UTILIZATION = "ome.io/targetUtilizationPercentage"
NO_ROLLOUT = "ome.io/disable-auto-update"
"""`"true"`: changes of its runtime or model reach the pods only with the next edit of the service."""
ROLLOUT = "ome.io/rollout-"
"""Prefix of the annotations of rollouts by steps."""
ENABLE_TAG_ROUTING = "ome.io/enable-tag-routing"
DEPRECATION_WARNING = "ome.io/deprecation-warning"
ACCELERATOR_CLASS = "ome.io/accelerator-class"
SERVICE_TYPE = "ome.io/service-type"
LOAD_BALANCER_IP = "ome.io/load-balancer-ip"
INJECT_MODEL_INIT = "ome.io/inject-model-init"
INJECT_FINE_TUNED_ADAPTER = "ome.io/inject-fine-tuned-adapter"
INJECT_SERVING_SIDECAR = "ome.io/inject-serving-sidecar"
VOLCANO_QUEUE = "ome.io/volcano-queue"
DEDICATED_AI_CLUSTER = "ome.io/dedicated-ai-cluster"
KUEUE_ENABLED = "kueue-enabled"
INGRESS_DOMAIN_TEMPLATE = "ome.io/ingress-domain-template"
INGRESS_DOMAIN = "ome.io/ingress-domain"
INGRESS_ADDITIONAL_DOMAINS = "ome.io/ingress-additional-domains"
INGRESS_URL_SCHEME = "ome.io/ingress-url-scheme"
INGRESS_PATH_TEMPLATE = "ome.io/ingress-path-template"
INGRESS_DISABLE_ISTIO = "ome.io/ingress-disable-istio-virtualhost"
INGRESS_DISABLE_CREATION = "ome.io/ingress-disable-creation"
KEDA_THRESHOLD = "autoscaling.keda.sh/threshold"
KEDA_OPERATOR = "autoscaling.keda.sh/operator"
KEDA_SERVER_ADDRESS = "autoscaling.keda.sh/prometheus.serverAddress"
KEDA_QUERY = "autoscaling.keda.sh/prometheus.query"
KNATIVE_MIN_SCALE = "autoscaling.knative.dev/min-scale"
KNATIVE_MAX_SCALE = "autoscaling.knative.dev/max-scale"
KNATIVE_ROLLOUT_DURATION = "serving.knative.dev/rollout-duration"
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
STORAGE_URI_INTERNAL = "internal.ome.io/storage-initializer-sourceuri"

# Annotations of a model, and those we put on pods.
MODEL_CATEGORY = "models.ome.io/category"
BASE_MODEL_NAME = "ome.io/base-model-name"
BASE_MODEL_VENDOR = "ome.io/base-model-vendor"
BASE_MODEL_FORMAT = "ome.io/base-model-format"
BASE_MODEL_FORMAT_VERSION = "ome.io/base-model-format-version"
BASE_MODEL_DECRYPTION_KEY = "ome.io/base-model-decryption-key-name"
BASE_MODEL_DECRYPTION_SECRET = "ome.io/base-model-decryption-secret-name"  # noqa: S105  the name of an annotation
SERVING_RUNTIME = "ome.io/serving-runtime"
FT_STRATEGY = "ome.io/fine-tuned-weight-ft-strategy"
MERGED_WEIGHTS = "ome.io/fine-tuned-serving-with-merged-weights"

MODEL_LABEL_DOMAIN = "models.ome.io"
LONGEST_LABEL = 63
_LABEL_ROOM = 49
"""OME's limit for the name of a model's label, including `clusterbasemodel.`."""
_KEY_ROOM = 253
_HASH = 8
_LEAST_NAMESPACE = 8


def component_name(service: str, component: str) -> str:
    """Return `llama-chat-engine`: the name of a component's Deployment, Knative Service, HPA, PDB."""
    return f"{service}-{component}"


def trunc63(name: str) -> str:
    """Return the name if it fits a label, else a digest and its end. Starts with a letter, as names of Services must."""
    if len(name) <= LONGEST_LABEL:
        return name
    short = _hashed(name, LONGEST_LABEL)
    return "a" + short[1:] if short[0].isdigit() else short


def last50(name: str) -> str:
    """Return the last 50 characters, for the names of LeaderWorkerSets and ScaledObjects."""
    return name[-50:]


def lws_name(component: str) -> str:
    """Return the name of the LeaderWorkerSet of `llama-chat-engine`."""
    return f"lws-{last50(component)}"


def scaled_object_name(component: str) -> str:
    """Return the name of the KEDA ScaledObject of `llama-chat-engine`."""
    return f"scaledobject-{last50(component)}"


def model_config_name(service: str) -> str:
    """Return the name of the ConfigMap that describes the served model."""
    return f"modelconfig-{service[-20:]}"


def model_label(name: str, namespace: str = "") -> str:
    """Return the node label of a model's state; without a namespace, that of a ClusterBaseModel."""
    return f"{MODEL_LABEL_DOMAIN}/{_model_key(name, namespace, _LABEL_ROOM)}"


def model_status_key(name: str, namespace: str = "") -> str:
    """Return the key of a model in the ConfigMap of a node."""
    return _model_key(name, namespace, _KEY_ROOM)


def _model_key(name: str, namespace: str, length: int) -> str:
    if not namespace:
        return f"clusterbasemodel.{_hashed(name, length - len('clusterbasemodel.'))}"
    length -= len(".basemodel.")
    if len(namespace) + len(name) > length:
        least = min(len(namespace), _LEAST_NAMESPACE)
        namespace, name = _hashed(namespace, least), _hashed(name, length - least)
    return f"{namespace}.basemodel.{name}"


def _hashed(name: str, max_length: int) -> str:
    if len(name) <= max_length:
        return name
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:_HASH]
    rest = max_length - _HASH - 1
    return f"{digest}-{name[-rest:]}" if rest > 0 else digest[:max_length]
