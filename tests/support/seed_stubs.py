# SPDX-License-Identifier: Apache-2.0
"""What a reader of the page on inference serving has: its proto, and the two modules that protoc makes of it.

Made once for all tests: protobuf has one pool for all modules of a program, and takes a name only once.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

SEEDS_PROTO = """
syntax = "proto3";
service InferenceService {
rpc Predict (PredictRequest) returns (PredictResponse);
rpc PredictStream (stream PredictRequest) returns (stream PredictResponse);
}
message PredictRequest {
repeated float inputs = 1;
string model_version = 2;
}
message PredictResponse {
repeated float predictions = 1;
string model_version = 2;
float latency_ms = 3;
}
"""


@cache
def seed_stubs() -> tuple[Any, Any]:
    """`inference_pb2` and `inference_pb2_grpc`."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "inference.proto").write_text(SEEDS_PROTO)
        run_protoc(f"-I{folder}", f"--python_out={folder}", f"--grpc_python_out={folder}", "inference.proto")
        sys.path.insert(0, folder)
        try:
            return importlib.import_module("inference_pb2"), importlib.import_module("inference_pb2_grpc")
        finally:
            sys.path.remove(folder)


def run_protoc(*arguments: str) -> None:
    """Run protoc in a process of its own: beside a framework that has loaded another protobuf library, it crashes."""
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], check=True)
