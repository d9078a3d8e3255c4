# SPDX-License-Identifier: Apache-2.0
"""v2 over gRPC: shared memory, trace settings and log settings. Registered by `grpc`."""

from __future__ import annotations

from typing import Any

from headrace.api.v2.grpc_messages import Methods
from headrace.api.v2.shared import V2Shared
from headrace.core.names import check_name
from headrace.net.grpc.services import Services

_LOG_FIELDS = {bool: "bool_param", int: "uint32_param", str: "string_param"}


class GrpcServerMethods:
    """Methods over what HTTP and gRPC share."""

    def __init__(self, shared: V2Shared) -> None:
        self._shared = shared
        self._memory = shared.memory
        self._tracing = shared.tracing
        self._logs = shared.logs

    def add_to(self, services: Services) -> None:
        """Serve the methods."""
        methods = Methods(services, self._shared)
        methods.add("shared-memory", "SystemSharedMemoryStatus", self.system_status)
        methods.add("shared-memory", "SystemSharedMemoryRegister", self.register_system)
        methods.add("shared-memory", "SystemSharedMemoryUnregister", self.unregister_system)
        methods.add("shared-memory", "CudaSharedMemoryStatus", self.cuda_status)
        methods.add("shared-memory", "CudaSharedMemoryRegister", self.register_cuda)
        methods.add("shared-memory", "CudaSharedMemoryUnregister", self.unregister_cuda)
        methods.add("trace", "TraceSetting", self.trace)
        methods.add("logging", "LogSettings", self.log)

    def system_status(self, request: Any, response: Any) -> None:
        """One region, or all."""
        for each in self._memory.system_regions(request.name):
            status = response.regions[each.name]
            status.name, status.key = each.name, each.key
            status.offset, status.byte_size = each.offset, each.byte_size

    def cuda_status(self, request: Any, response: Any) -> None:
        """One region, or all."""
        for each in self._memory.cuda_regions(request.name):
            status = response.regions[each.name]
            status.name, status.device_id, status.byte_size = each.name, each.device_id, each.byte_size

    def register_system(self, request: Any, response: Any) -> None:
        """Take a region that the client made."""
        self._memory.register_system(request.name, request.key, request.offset, request.byte_size)

    def register_cuda(self, request: Any, response: Any) -> None:
        """The same for a GPU's memory."""
        self._memory.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)

    def unregister_system(self, request: Any, response: Any) -> None:
        """Forget a region, or all."""
        self._memory.unregister_system(request.name)

    def unregister_cuda(self, request: Any, response: Any) -> None:
        """Forget a region, or all."""
        self._memory.unregister_cuda(request.name)

    def trace(self, request: Any, response: Any) -> None:
        """Change some trace settings, or none, and show all."""
        model = check_name(request.model_name) if request.model_name else ""
        changes = {name: list(setting.value) for name, setting in request.settings.items()}
        if changes:
            self._tracing.change(model, changes)
        for name, values in self._tracing.shown(model).items():
            response.settings[name].value.extend(values)

    def log(self, request: Any, response: Any) -> None:
        """Change some log settings, or none, and show all."""
        changes = {name: _value(setting) for name, setting in request.settings.items()}
        if changes:
            self._logs.change(changes)
        for name, value in self._logs.shown().items():
            setattr(response.settings[name], _LOG_FIELDS[type(value)], value)


def _value(setting: Any) -> Any:
    chosen = setting.WhichOneof("parameter_choice")
    return None if chosen is None else getattr(setting, chosen)
