# SPDX-License-Identifier: Apache-2.0
"""Who may ask what: every route and every call of every program, by the right that it needs.

Read by `test_security_authorisation`. A route that is not here fails that test, and so does one that is gone: to add one
is to say here whom it is for. Placeholders are `{}`, as `Routes.listed` has them.
"""

from __future__ import annotations

Rights = dict[str, str]
"""By right; one route or call per line."""


def by_route(rights: Rights) -> dict[str, str]:
    """The right that each needs."""
    return {line.strip(): right for right, lines in rights.items() for line in lines.strip().splitlines()}


SERVER: Rights = {
    "open": """
        GET /api/health
        GET /api/health/live
        GET /api/health/ready
        GET /
        GET /console
        GET /console/
        GET /console/assets/{}/{}
        GET /health
        GET /healthz
        GET /livez
        GET /ready
        GET /readyz
        GET /v2/health/live
        GET /v2/health/ready
    """,
    "infer": """
        POST /api/infer/{}
        POST /api/infer/{}/{}
        GET /predict
        POST /predict
        GET /predict/stream
        GET /predict/{}
        POST /predict/{}
        GET /predict/{}/stream
        POST /v1/chat/completions
        POST /v1/completions
        POST /v1/headrace/continue
        POST /v1/responses
        POST /v1/responses/input_tokens
        GET /v1/responses/{}
        DELETE /v1/responses/{}
        POST /v1/responses/{}/cancel
        GET /v1/responses/{}/input_items
        POST /v1/messages
        POST /v1/messages/count_tokens
        POST /v1/embeddings
        POST /v1/rerank
        POST /rerank
        POST /v2/rerank
        POST /v1/score
        POST /v1/audio/transcriptions
        POST /v1/audio/translations
        POST /score
        POST /tokenize
        POST /detokenize
        POST /v1/headrace/prefill
        GET /v1/models
        GET /v1/models/{}
        GET /v1/files
        POST /v1/files
        DELETE /v1/files/{}
        GET /v1/files/{}
        GET /v1/files/{}/content
        GET /v1/batches
        POST /v1/batches
        GET /v1/batches/{}
        POST /v1/batches/{}/cancel
        POST /v2/models/{}/generate
        POST /v2/models/{}/generate_stream
        POST /v2/models/{}/infer
        POST /v2/models/{}/versions/{}/generate
        POST /v2/models/{}/versions/{}/generate_stream
        POST /v2/models/{}/versions/{}/infer
    """,
    "read": """
        GET /api/repository/index
        GET /api/sharedmemorycontrol/status
        GET /api/status
        GET /api/status/
        GET /api/status/{}
        GET /console/api/history
        GET /console/api/live
        GET /console/api/requests
        GET /docs
        GET /metrics
        GET /openapi.json
        GET /v2
        GET /v2/cudasharedmemory/region/{}/status
        GET /v2/cudasharedmemory/status
        GET /v2/logging
        GET /v2/models/stats
        GET /v2/models/{}
        GET /v2/models/{}/config
        GET /v2/models/{}/ready
        GET /v2/models/{}/stats
        GET /v2/models/{}/trace/setting
        GET /v2/models/{}/versions/{}
        GET /v2/models/{}/versions/{}/config
        GET /v2/models/{}/versions/{}/ready
        GET /v2/models/{}/versions/{}/stats
        POST /v2/repository/index
        GET /v2/systemsharedmemory/region/{}/status
        GET /v2/systemsharedmemory/status
        GET /v2/trace/setting
    """,
    "admin": """
        GET /admin/traffic
        DELETE /admin/traffic/{}
        GET /admin/traffic/{}
        POST /admin/traffic/{}
        PUT /admin/traffic/{}
        GET /admin/traffic/{}/report
        POST /admin/traffic/{}/rollback
        POST /api/modelcontrol/load/{}
        POST /api/modelcontrol/unload/{}
        POST /console/api/requests
        GET /api/profile
        GET /api/profile/
        POST /api/sharedmemorycontrol/cudaregister/{}/{}/{}
        POST /api/sharedmemorycontrol/register/{}//{}/{}/{}
        POST /api/sharedmemorycontrol/register/{}/{}/{}/{}
        POST /api/sharedmemorycontrol/status
        POST /api/sharedmemorycontrol/unregister/{}
        POST /api/sharedmemorycontrol/unregisterall
        POST /v2/cudasharedmemory/region/{}/register
        POST /v2/cudasharedmemory/region/{}/unregister
        POST /v2/cudasharedmemory/unregister
        POST /v2/logging
        POST /v2/models/{}/trace/setting
        POST /v1/load_lora_adapter
        POST /v1/unload_lora_adapter
        POST /v1/models/{}/sleep
        POST /v1/models/{}/wake
        POST /v2/repository/models/{}/load
        POST /v2/repository/models/{}/unload
        POST /v2/systemsharedmemory/region/{}/register
        POST /v2/systemsharedmemory/region/{}/unregister
        POST /v2/systemsharedmemory/unregister
        POST /v2/trace/setting
    """,
}

SERVER_CALLS: Rights = {
    "open": """
        /inference.GRPCInferenceService/ServerLive
        /inference.GRPCInferenceService/ServerReady
        /nvidia.inferenceserver.GRPCService/Health
        /grpc.health.v1.Health/Check
        /grpc.health.v1.Health/Watch
    """,
    "infer": """
        /inference.GRPCInferenceService/ModelInfer
        /inference.GRPCInferenceService/ModelStreamInfer
        /nvidia.inferenceserver.GRPCService/Infer
        /nvidia.inferenceserver.GRPCService/StreamInfer
        /InferenceService/Predict
        /InferenceService/PredictStream
    """,
    "read": """
        /inference.GRPCInferenceService/ModelReady
        /inference.GRPCInferenceService/ServerMetadata
        /inference.GRPCInferenceService/ModelMetadata
        /inference.GRPCInferenceService/ModelConfig
        /inference.GRPCInferenceService/ModelStatistics
        /inference.GRPCInferenceService/RepositoryIndex
        /inference.GRPCInferenceService/SystemSharedMemoryStatus
        /inference.GRPCInferenceService/CudaSharedMemoryStatus
        /nvidia.inferenceserver.GRPCService/Status
        /nvidia.inferenceserver.GRPCService/Repository
        /grpc.reflection.v1.ServerReflection/ServerReflectionInfo
        /grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo
    """,
    "admin": """
        /inference.GRPCInferenceService/RepositoryModelLoad
        /inference.GRPCInferenceService/RepositoryModelUnload
        /inference.GRPCInferenceService/SystemSharedMemoryRegister
        /inference.GRPCInferenceService/SystemSharedMemoryUnregister
        /inference.GRPCInferenceService/CudaSharedMemoryRegister
        /inference.GRPCInferenceService/CudaSharedMemoryUnregister
        /inference.GRPCInferenceService/TraceSetting
        /inference.GRPCInferenceService/LogSettings
        /nvidia.inferenceserver.GRPCService/Profile
        /nvidia.inferenceserver.GRPCService/ModelControl
        /nvidia.inferenceserver.GRPCService/SharedMemoryControl
    """,
}

GATEWAY: Rights = {
    "open": """
        GET /health
        GET /health/liveness
        GET /health/readiness
        GET /version
        GET /api/v1/health
        GET /api/v1/health/liveness
        GET /api/v1/health/readiness
        GET /api/v1/version
        GET /api/v2/health
        GET /api/v2/health/liveness
        GET /api/v2/health/readiness
        GET /api/v2/version
        POST /api/v1/login
        POST /api/v2/login
        GET /docs
        GET /openapi.json
        GET /metrics
        GET /
        GET /console
        GET /console/
        GET /console/assets/{}/{}
    """,
    "viewer": """
        GET /api/v2/orgs/{}/session
        GET /api/v1/orgs/{}/workspaces
        GET /api/v1/orgs/{}/workspaces/{}
        GET /api/v2/orgs/{}/workspaces
        GET /api/v2/orgs/{}/workspaces/{}
        GET /api/v1/orgs/{}/experiments
        GET /api/v1/orgs/{}/experiments/{}
        GET /api/v1/orgs/{}/experiments:base
        GET /api/v2/orgs/{}/jobs:list_base_experiments
        GET /api/v1/orgs/{}/experiments/{}/jobs
        GET /api/v1/orgs/{}/experiments/{}/jobs/{}
        GET /api/v1/orgs/{}/experiments/{}/jobs/{}/logs
        GET /api/v1/orgs/{}/experiments/{}/jobs/{}:logs
        GET /api/v1/orgs/{}/experiments/{}/jobs/{}:events
        GET /api/v2/orgs/{}/jobs
        GET /api/v2/orgs/{}/jobs/{}
        GET /api/v2/orgs/{}/jobs/{}/logs
        GET /api/v2/orgs/{}/jobs/{}:logs
        GET /api/v2/orgs/{}/jobs/{}:events
        GET /api/v1/orgs/{}/experiments/{}/jobs/{}/inference_microservice/status
        GET /api/v2/orgs/{}/inference_microservices/{}:status
    """,
    "operator": """
        POST /api/v1/orgs/{}/workspaces
        DELETE /api/v1/orgs/{}/workspaces
        PUT /api/v1/orgs/{}/workspaces/{}
        PATCH /api/v1/orgs/{}/workspaces/{}
        DELETE /api/v1/orgs/{}/workspaces/{}
        POST /api/v2/orgs/{}/workspaces
        DELETE /api/v2/orgs/{}/workspaces
        PUT /api/v2/orgs/{}/workspaces/{}
        PATCH /api/v2/orgs/{}/workspaces/{}
        DELETE /api/v2/orgs/{}/workspaces/{}
        POST /api/v1/orgs/{}/experiments
        PUT /api/v1/orgs/{}/experiments/{}
        PATCH /api/v1/orgs/{}/experiments/{}
        DELETE /api/v1/orgs/{}/experiments/{}
        POST /api/v1/orgs/{}/experiments/{}/jobs
        DELETE /api/v1/orgs/{}/experiments/{}/jobs/{}
        POST /api/v1/orgs/{}/experiments/{}/jobs/{}:cancel
        POST /api/v1/orgs/{}/experiments/{}/jobs/{}:pause
        POST /api/v1/orgs/{}/experiments/{}/jobs/{}:resume
        POST /api/v1/orgs/{}/experiments/{}/jobs/{}:retry
        POST /api/v2/orgs/{}/jobs
        DELETE /api/v2/orgs/{}/jobs/{}
        POST /api/v2/orgs/{}/jobs/{}:cancel
        POST /api/v2/orgs/{}/jobs/{}:pause
        POST /api/v2/orgs/{}/jobs/{}:resume
        POST /api/v2/orgs/{}/jobs/{}:retry
        POST /api/v1/orgs/{}/experiments/{}/inference_microservice/start
        POST /api/v1/orgs/{}/experiments/{}/jobs/{}/inference_microservice/stop
        POST /api/v1/orgs/{}/experiments/{}/jobs/{}/inference_microservice/inference
        POST /api/v2/orgs/{}/inference_microservices:start
        POST /api/v2/orgs/{}/inference_microservices/{}:stop
        DELETE /api/v2/orgs/{}/inference_microservices/{}:stop
        POST /api/v2/orgs/{}/inference_microservices/{}:inference
    """,
    "admin": """
        GET /api/v2/orgs/{}/audit
        POST /api/v1/orgs/{}/workspaces:backup
        POST /api/v1/orgs/{}/workspaces:restore
        POST /api/v1/orgs/{}/workspaces/{}:backup
        POST /api/v1/orgs/{}/workspaces/{}:restore
        POST /api/v1/orgs/{}/workspaces/{}/backup
        POST /api/v1/orgs/{}/workspaces/{}/restore
        POST /api/v2/orgs/{}/workspaces:backup
        POST /api/v2/orgs/{}/workspaces:restore
        POST /api/v2/orgs/{}/workspaces/{}:backup
        POST /api/v2/orgs/{}/workspaces/{}:restore
        POST /api/v2/orgs/{}/workspaces/{}/backup
        POST /api/v2/orgs/{}/workspaces/{}/restore
    """,
    "token": """
        POST /api/v1/logout
        POST /api/v2/logout
    """,
    "service": """
        POST /api/v1/orgs/{}/experiments/{}/jobs/{}:status_update
    """,
}

METRICS_PORT: Rights = {
    "read": """
        GET /metrics
    """,
}

MICROSERVICE: Rights = {
    "open": """
        GET /api/v1/health/liveness
        GET /api/v1/health/readiness
        GET /api/v1/status
        POST /api/v1/inference
        POST /v1/chat/completions
        GET /v1/models
        GET /metrics
    """,
}

ROUTER: Rights = {
    "open": """
        GET /router/status
        GET /router/metrics
        GET /router/healthz
        POST /router/explain
    """,
}

OPERATOR: Rights = {
    "open": """
        GET /metrics
        GET /healthz
        GET /readyz
    """,
}

AGENT: Rights = {
    "open": """
        GET /metrics
        GET /healthz
        GET /readyz
    """,
}

NODE: Rights = {
    "open": """
        GET /v2/health/live
        GET /v2/health/ready
    """,
}

LOCAL_FLEET: Rights = {
    "owner": """
        POST /v1/{}
    """,
}

FLEET_CONSOLE: Rights = {
    "open": """
        GET /
        GET /console
        GET /console/
        GET /console/assets/{}/{}
    """,
    "key": """
        GET /console/api/services
        GET /console/api/events
        GET /console/api/services/{}/{}
        GET /console/api/services/{}/{}/logs
        POST /console/api/services/{}/{}/scale
        POST /console/api/services/{}/{}/rollout
        DELETE /console/api/services/{}/{}
    """,
}

WEBHOOKS: Rights = {
    "open": """
        GET /readyz
        POST /mutate-ome-io-v1beta1-inferenceservice
        POST /validate-ome-io-v1beta1-inferenceservice
        POST /validate-ome-io-v1beta1-servingruntime
        POST /validate-ome-io-v1beta1-clusterservingruntime
        POST /validate-ome-io-v1beta1-basemodel
        POST /validate-ome-io-v1beta1-clusterbasemodel
        POST /validate-ome-io-v1beta1-finetunedweight
        POST /validate-ome-io-v1beta1-acceleratorclass
        POST /validate-ome-io-v1beta1-benchmarkjob
    """,
}
