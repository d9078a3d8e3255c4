# SPDX-License-Identifier: Apache-2.0
"""Errors of the engine in the words of v2: Triton's core puts the request's id before what it says of a request.

Called by the handlers for what the data plane raises at once. What is wrong with the bytes of a request, and a model that
is not there, is told without an id, as Triton does.
"""

from __future__ import annotations

from headrace.core.errors import HeadraceError, InvalidArgument, ResourceExhausted, Unimplemented, retold
from headrace.core.messages import InferRequest
from headrace.engine.dataplane import DataPlane

_ID_LENGTH = 128


def told(plane: DataPlane, request: InferRequest, error: HeadraceError, door: str) -> HeadraceError:
    """The error for the caller. `door` names what it called, for models that cannot answer there."""
    if not isinstance(error, InvalidArgument | ResourceExhausted | Unimplemented):
        return error
    version = plane.find(request.model_name, request.model_version)
    if version is None:
        return error
    if isinstance(error, Unimplemented):
        if not version.config.decoupled:
            return error
        return retold(error, f"{door} doesn't support models with decoupled transaction policy: {error.message}")
    return retold(error, f"[request id: {request.id[:_ID_LENGTH] or '<id_unknown>'}] {error.message}")
