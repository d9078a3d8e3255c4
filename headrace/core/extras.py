# SPDX-License-Identifier: Apache-2.0
"""Optional packages: the extra that installs each of them, and the error that names the missing extra.

Code that needs an optional package imports it where it is used. If it can say what needs the package (a URL, an option, a
backend), it raises `MissingExtra`. Otherwise the ImportError reaches the `headrace` command, which looks the package up in
`EXTRA_OF_MODULE`.
"""

from __future__ import annotations

from typing import Final

from headrace.core.errors import FailedPrecondition

EXTRA_OF_MODULE: Final = {
    "PIL": "media",
    "aiohttp": "ray",
    "argon2": "jobs",
    "av": "media",
    "cryptography": "jobs",
    "grpc": "grpc",
    "httpx2": "kubernetes",
    "huggingface_hub": "cloud",
    "jinja2": "llm",
    "jwt": "jobs",
    "lightgbm": "lightgbm",
    "llguidance": "llm",
    "matplotlib": "plot",
    "msgspec": "kubernetes",
    "obstore": "cloud",
    "onnx": "netdef",
    "onnxruntime": "onnx",
    "opentelemetry": "trace",
    "openvino": "openvino",
    "psycopg": "postgresql",
    "pyarrow": "parquet",
    "pynvml": "gpu",
    "ray": "ray",
    "redis": "redis",
    "safetensors": "llm",
    "skops": "sklearn",
    "sklearn": "sklearn",
    "sqlalchemy": "jobs",
    "starlette": "ray",
    "tensorflow": "tensorflow",
    "tokenizers": "llm",
    "torch": "pytorch",
    "transformers": "llm",
    "xgboost": "xgboost",
    "zmq": "kv-events",
}
"""Every module from an optional package that Headrace imports, and one extra that installs it."""


class MissingExtra(FailedPrecondition):
    """Raise when a package of an extra is not installed; a command exits with code 2."""

    def __init__(self, subject: str, extra: str, otherwise: str = "") -> None:
        """Name what needs the extra; `otherwise` is what to do without it."""
        hint = f", or {otherwise}" if otherwise else ""
        super().__init__(f"{subject} needs the extra \"{extra}\": pip install 'headrace[{extra}]'{hint}")
        self.extra = extra


def extra_of(error: ImportError) -> str | None:
    """Return the extra that installs the module which was not found; None if no extra does."""
    if not isinstance(error, ModuleNotFoundError):
        return None  # the package is installed and broken: another installation of it may not help
    return EXTRA_OF_MODULE.get((error.name or "").partition(".")[0])
