# SPDX-License-Identifier: Apache-2.0
"""Compile `proto/` into the descriptor sets that the package loads; `--check` fails if a committed one is out of date.

Run by `make protos` and, with `--check`, by `make check`. Needs grpcio-tools (in the `test` extra).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent

SETS = {
    "headrace/net/grpc/_generated/grpc.binpb": [
        "grpc/health/v1/health.proto",
        "grpc/reflection/v1/reflection.proto",
        "grpc/reflection/v1alpha/reflection.proto",
    ],
    "headrace/api/v1/_generated/nvidia.binpb": ["nvidia/inferenceserver.proto", "nvidia/inferenceserver_v0.proto"],
    "headrace/api/v2/_generated/inference.binpb": ["inference/grpc_service.proto"],
    "headrace/api/predict/_generated/predict.binpb": ["predict/inference.proto"],
    "headrace/client/_generated/inference.binpb": ["inference/grpc_service.proto"],
    "headrace/models/config/_generated/model_config.binpb": ["inference/model_config.proto"],
    "headrace/fleet/router/_generated/ext_proc.binpb": ["envoy/service/ext_proc/v3/external_processor.proto"],
    "headrace/backends/netdef/_generated/caffe2.binpb": ["caffe2/caffe2.proto"],
}
"""Each descriptor set, and the files it is made of."""


def compile_set(sources: list[str], output: Path) -> None:
    """Run protoc."""
    includes = [f"-I{folder}" for folder in (ROOT / "proto", Path(grpc_tools.__file__).parent / "_proto")]
    status = protoc.main(["protoc", *includes, f"--descriptor_set_out={output}", "--include_imports", *sources])
    if status:
        raise SystemExit(f"protoc failed on {', '.join(sources)}")


def main() -> int:
    """Compile, or compare."""
    check = "--check" in sys.argv[1:]
    stale = []
    for target, sources in SETS.items():
        path = ROOT / target
        with tempfile.TemporaryDirectory() as folder:
            fresh = Path(folder) / "set.binpb"
            compile_set(sources, fresh)
            content = fresh.read_bytes()
        if not path.exists() or path.read_bytes() != content:
            stale.append(target)
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
    if check and stale:
        print("out of date, run 'make protos':", *stale, sep="\n  ")
        return 1
    print(f"{len(SETS)} descriptor sets", "checked" if check else f"compiled, {len(stale)} changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
