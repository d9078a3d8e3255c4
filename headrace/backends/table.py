# SPDX-License-Identifier: Apache-2.0
"""The table of backends by name. A backend is imported when the first model needs it.

Other packages add backends by an entry point of the group `headrace.backends`: its name is the value of `backend:`, its
object a class without arguments (`contract.Backend`). They cannot replace a built-in backend.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from threading import RLock

from headrace.backends.contract import Backend
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.core.extras import MissingExtra

BACKENDS = {
    "onnxruntime": "headrace.backends.onnx.backend:OnnxBackend",
    "python": "headrace.backends.python.backend:PythonBackend",
    "tensorflow": "headrace.backends.tensorflow.backend:TensorFlowBackend",
    "pytorch": "headrace.backends.pytorch.backend:PyTorchBackend",
    "netdef": "headrace.backends.netdef.backend:NetDefBackend",
    "tensorrt": "headrace.backends.tensorrt.backend:TensorRTBackend",
    "openvino": "headrace.backends.openvino.backend:OpenVINOBackend",
    "xgboost": "headrace.backends.tabular.xgboost:XGBoostBackend",
    "lightgbm": "headrace.backends.tabular.lightgbm:LightGBMBackend",
    "sklearn": "headrace.backends.tabular.sklearn:SklearnBackend",
    "identity": "headrace.backends.identity:IdentityBackend",
    "llm": "headrace.backends.llm.backend:LlmBackend",
    "openai_proxy": "headrace.backends.openai_proxy.backend:OpenAiProxyBackend",
    "huggingface_vision": "headrace.backends.vision.backend:HuggingFaceVisionBackend",
}
"""The built-in backends, by the value of `backend:`."""

EXTRAS = {
    "onnxruntime": "onnx",
    "tensorflow": "tensorflow",
    "pytorch": "pytorch",
    "netdef": "netdef",
    "openvino": "openvino",
    "xgboost": "xgboost",
    "lightgbm": "lightgbm",
    "sklearn": "sklearn",
    "llm": "llm",
    "huggingface_vision": "llm",
}
"""The extra that installs the packages of each backend."""

INSTALL_HINTS = {
    "tensorrt": "install TensorRT 10 or newer for this machine's GPU from NVIDIA: pip install tensorrt 'cuda-python>=12.9.1'"
}
"""What to install where no extra can."""

ISOLATED = frozenset({"identity", "openai_proxy", "python"})
"""Backends that read no model file in the server's process."""

ENTRY_POINTS = "headrace.backends"

_IMPORT_LOCK = RLock()
"""Models load in several threads, and packages with lazy imports (transformers) break if two threads import at once."""


_LOADED: dict[str, Backend] = {}
"""Loaded backends by name. `functools.cache` would create one per thread that asks first."""


def backend_named(name: str) -> Backend:
    """Return the backend, or raise an error that says how to install it."""
    backend = _LOADED.get(name)
    if backend is None:
        with _IMPORT_LOCK:
            backend = _LOADED.get(name) or _load(name)
            _LOADED[name] = backend
    return backend


def _load(name: str) -> Backend:
    target = BACKENDS.get(name)
    if target is None:
        return _entry_points(name)
    module, attribute = target.split(":")
    try:
        backend: Backend = getattr(import_module(module), attribute)()
    except ImportError as error:
        if (error.name or "").startswith("headrace") or not (name in EXTRAS or name in INSTALL_HINTS):
            raise
        if name in EXTRAS and isinstance(error, ModuleNotFoundError):
            raise MissingExtra(f"backend '{name}'", EXTRAS[name]) from None
        remedy = INSTALL_HINTS.get(name) or f"pip install 'headrace[{EXTRAS[name]}]'"
        raise FailedPrecondition(
            f"backend '{name}' needs a package that is not installed ({error.name or 'a library of it'}): {remedy}"
        ) from None
    return backend


def _entry_points(name: str) -> Backend:
    added = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in added:
        known = ", ".join(sorted({*BACKENDS, *added}))
        raise InvalidArgument(f"backend '{name[:64]}' is not known: use one of {known}")
    backend: Backend = added[name].load()()
    return backend
