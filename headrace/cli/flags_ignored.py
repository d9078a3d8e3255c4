# SPDX-License-Identifier: Apache-2.0
"""Options that Triton or its first releases have and that mean nothing here, each with the reason.

Read by `serve_arguments`, which warns with it, so that a command line of Triton's works as it is.
"""

from __future__ import annotations

from headrace.cli.flags import Ignored

_THREADS = "one event loop serves all connections of a process; --workers adds processes"
_POOLS = "memory is taken as it is needed, without pools"
_PINGS = "the server answers pings and sends none; connections without a request are closed after two minutes"
_TENSORFLOW = "set it in the model's configuration, under parameters"
_SHARED_LIBRARIES = "backends are Python packages; what is installed is found"
_SAGEMAKER = "there is no endpoint for SageMaker"
_VERTEX = "there is no endpoint for Vertex AI"

IGNORED: tuple[Ignored, ...] = (
    Ignored("api-version", "every version of the protocol is spoken on the same ports"),
    Ignored("http-thread-count", _THREADS, "whole"),
    Ignored("grpc-infer-thread-count", _THREADS, "whole"),
    Ignored("grpc-stream-infer-thread-count", _THREADS, "whole"),
    Ignored("grpc-infer-allocation-pool-size", _POOLS, "whole"),
    Ignored("buffer-manager-thread-count", "tensors are used where they arrived and seldom copied", "whole", ("0",)),
    Ignored("pinned-memory-pool-byte-size", _POOLS, "whole"),
    Ignored("cuda-memory-pool-byte-size", _POOLS),
    Ignored("cuda-virtual-address-size", _POOLS),
    Ignored("min-supported-compute-capability", "the libraries of each backend say which GPUs they can use", "number"),
    Ignored("model-load-gpu-limit", "what a model may take of a GPU is set in its configuration"),
    Ignored("enable-peer-access", "each backend's own library decides how GPUs reach each other", "truth"),
    Ignored("model-config-name", "a model has one configuration, config.pbtxt, config.json or config.yaml"),
    Ignored("host-policy", "use numactl or taskset to bind the server to cores"),
    Ignored("backend-directory", _SHARED_LIBRARIES),
    Ignored("repoagent-directory", "there are no repository agents"),
    Ignored("cache-directory", "the response cache is built in"),
    Ignored("backend-config", "backends take their settings from each model's configuration, under parameters"),
    Ignored("model-namespacing", "all repositories share one set of names", "truth", ("false", "0")),
    Ignored("model-load-retry-count", "a model that failed is tried again when its files change", "whole", ("0",)),
    Ignored("tf-gpu-memory-fraction", _TENSORFLOW, "number", ("0", "0.0")),
    Ignored("tf-allow-soft-placement", _TENSORFLOW, "truth", ("true", "1")),
    Ignored("tf-add-vgpu", _TENSORFLOW),
    Ignored("platform-config-file", _TENSORFLOW),
    Ignored(
        "grpc-infer-response-compression-level", "who compresses its messages gets compressed ones", "text", ("none",)
    ),
    Ignored("grpc-keepalive-time", _PINGS, "whole"),
    Ignored("grpc-keepalive-timeout", _PINGS, "whole"),
    Ignored("grpc-keepalive-permit-without-calls", _PINGS, "truth"),
    Ignored("grpc-http2-max-pings-without-data", _PINGS, "whole"),
    Ignored("grpc-http2-min-recv-ping-interval-without-data", _PINGS, "whole"),
    Ignored("grpc-http2-max-ping-strikes", _PINGS, "whole"),
    Ignored("grpc-max-connection-age", "connections live as long as they are used", "whole"),
    Ignored("grpc-max-connection-age-grace", "connections live as long as they are used", "whole"),
    Ignored("allow-sagemaker", _SAGEMAKER, "truth", ("false", "0")),
    Ignored("sagemaker-port", _SAGEMAKER, "whole"),
    Ignored("sagemaker-safe-port-range", _SAGEMAKER),
    Ignored("sagemaker-thread-count", _SAGEMAKER, "whole"),
    Ignored("allow-vertex-ai", _VERTEX, "truth", ("false", "0")),
    Ignored("vertex-ai-port", _VERTEX, "whole"),
    Ignored("vertex-ai-thread-count", _VERTEX, "whole"),
    Ignored("vertex-ai-default-model", _VERTEX),
)
