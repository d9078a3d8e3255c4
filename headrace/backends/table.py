# SPDX-License-Identifier: Apache-2.0
"""Which backend a configuration means. Read by the engine; a backend is imported when the first model needs it."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from headrace.backends.contract import Backend
from headrace.core.errors import FailedPrecondition, InvalidArgument

BACKENDS = {
    "onnxruntime": "headrace.backends.onnx:OnnxBackend",
    "python": "headrace.backends.python.backend:PythonBackend",
    "identity": "headrace.backends.identity:IdentityBackend",
}
"""Every backend by the name that `backend:` gives it."""

EXTRAS = {"onnxruntime": "onnx"}
"""The extra that installs what a backend needs."""


@cache
def backend_named(name: str) -> Backend:
    """The backend, or what to do to have it."""
    target = BACKENDS.get(name)
    if target is None:
        raise InvalidArgument(f"backend '{name[:64]}' is not known: use one of {', '.join(sorted(BACKENDS))}")
    module, attribute = target.split(":")
    try:
        backend: Backend = getattr(import_module(module), attribute)()
    except ImportError as error:
        extra = EXTRAS.get(name)
        if extra is None or (error.name or "").startswith("headrace"):
            raise
        raise FailedPrecondition(
            f"backend '{name}' needs a package that is not installed ({error.name}): pip install 'headrace[{extra}]'"
        ) from None
    return backend
