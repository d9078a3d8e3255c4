# SPDX-License-Identifier: Apache-2.0
"""Which backend a configuration means. Read by the engine; a backend is imported when the first model needs it.

Packages of others add theirs by an entry point of the group `headrace.backends`, whose name is what `backend:` says and
whose object is a class without arguments (`contract.Backend`). They cannot take the name of one that is here.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from threading import RLock

from headrace.backends.contract import Backend
from headrace.core.errors import FailedPrecondition, InvalidArgument

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
"""Every backend by the name that `backend:` gives it."""

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
"""The extra that installs what a backend needs."""

BY_HAND = {
    "tensorrt": "install TensorRT 10 or newer for this machine's GPU from NVIDIA: pip install tensorrt 'cuda-python>=12.9.1'"
}
"""What to do where no extra can."""

ENTRY_POINTS = "headrace.backends"

_ONE_AT_A_TIME = RLock()
"""Models load in several threads, and packages that import their parts late (transformers) break when two begin at once."""


_MADE: dict[str, Backend] = {}
"""By name. Not `functools.cache`, which makes one for each of several threads that ask for it first."""


def backend_named(name: str) -> Backend:
    """The backend, or what to do to have it."""
    made = _MADE.get(name)
    if made is None:
        with _ONE_AT_A_TIME:
            made = _MADE.get(name) or _make(name)
            _MADE[name] = made
    return made


def _make(name: str) -> Backend:
    target = BACKENDS.get(name)
    if target is None:
        return _of_others(name)
    module, attribute = target.split(":")
    try:
        backend: Backend = getattr(import_module(module), attribute)()
    except ImportError as error:
        if (error.name or "").startswith("headrace") or not (name in EXTRAS or name in BY_HAND):
            raise
        remedy = BY_HAND.get(name) or f"pip install 'headrace[{EXTRAS[name]}]'"
        raise FailedPrecondition(
            f"backend '{name}' needs a package that is not installed ({error.name or 'a library of it'}): {remedy}"
        ) from None
    return backend


def _of_others(name: str) -> Backend:
    added = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in added:
        known = ", ".join(sorted({*BACKENDS, *added}))
        raise InvalidArgument(f"backend '{name[:64]}' is not known: use one of {known}")
    backend: Backend = added[name].load()()
    return backend
