# SPDX-License-Identifier: Apache-2.0
"""The table of fuzz targets by name. A new target is a row here, a module beside it, and seed inputs in `corpus`."""

from __future__ import annotations

import importlib
from types import MappingProxyType

from fuzz.target import Target

TARGETS = MappingProxyType(
    {
        "http1": "connections:HTTP1",
        "http2": "connections:HTTP2",
        "http2-frames": "connections:HTTP2_FRAMES",
        "hpack": "hpack:TARGET",
        "websocket": "websocket:TARGET",
        "v1-header": "v1:HEADER",
        "v1-body": "v1:BODY",
        "v2-json": "v2:JSON",
        "v2-binary": "v2:BINARY",
        "v2-grpc": "v2:GRPC",
        "predict": "predict:TARGET",
        "chat": "chat:TARGET",
        "pbtxt": "modelconfigs:PBTXT",
        "config-json": "modelconfigs:JSON",
        "config-yaml": "modelconfigs:YAML",
        "netdef": "model_files:NETDEF",
        "model-file": "model_files:DETECTED",
        "archive": "archives:TARGET",
        "inference-service": "services:TARGET",
        "url": "urls:TARGET",
        "multipart": "multipart:TARGET",
        "wav": "audio:TARGET",
    }
)


def target_named(name: str) -> Target:
    """The target of a name in the table."""
    module, _, attribute = TARGETS[name].partition(":")
    target: Target = getattr(importlib.import_module(f"fuzz.targets.{module}"), attribute)
    return target
