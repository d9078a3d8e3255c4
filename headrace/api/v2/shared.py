# SPDX-License-Identifier: Apache-2.0
"""What v2 over HTTP and v2 over gRPC have in common: one table of shared memory, one set of trace and log settings.

Made by a composition root and given to `V2Http` and `V2Grpc`.
"""

from __future__ import annotations

from headrace.api.shared_memory.regions import SharedMemory
from headrace.api.v2.decode_times import DecodeTimes
from headrace.api.v2.logging_control import LogControl
from headrace.api.v2.outputs import OutputPlanner
from headrace.api.v2.restrictions import GRPC_PREFIX, Gate
from headrace.api.v2.settings import V2Settings
from headrace.api.v2.tracing import infer_stream_traced
from headrace.api.v2.tracing_control import TraceControl
from headrace.core.messages import InferRequest
from headrace.core.telemetry.tracing import NO_TRACING, Tracer
from headrace.engine.dataplane import DataPlane
from headrace.engine.scheduling.pending import Answered, Pending
from headrace.net.http.heads import RequestHead

_EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
)
_SHARED_MEMORY = ("system_shared_memory", "cuda_shared_memory")
_MORE_EXTENSIONS = ("binary_tensor_data", "parameters", "statistics", "trace", "logging")


class V2Shared:
    """See the module."""

    def __init__(
        self,
        plane: DataPlane,
        settings: V2Settings | None = None,
        tracer: Tracer = NO_TRACING,
        memory: SharedMemory | None = None,
    ) -> None:
        settings = settings or V2Settings()
        self.plane = plane
        self.settings = settings
        self.memory = memory or SharedMemory(allowed=settings.allow_client_shm)
        self.tracing = TraceControl(plane, tracer, settings.trace)
        self.decode_times = DecodeTimes()
        self.logs = LogControl()
        self.outputs = OutputPlanner(plane, self.memory)
        self.http_gate = Gate(settings.http_restrictions)
        self.grpc_gate = Gate(settings.grpc_restrictions, "protocol", GRPC_PREFIX)
        shared = _SHARED_MEMORY if self.memory.allowed else ()
        self.extensions = (*_EXTENSIONS, *shared, *_MORE_EXTENSIONS)
        """Those of Triton's that this server has."""

    def infer_stream(self, head: RequestHead, request: InferRequest, answered: Answered) -> Pending:
        """`DataPlane.infer_stream`, traced if the settings choose this request."""
        if self.tracing.enabled and self.tracing.wants(request.model_name):
            return infer_stream_traced(self.plane, self.tracing.tracer, head, request, answered)
        return self.plane.infer_stream(request, answered)
