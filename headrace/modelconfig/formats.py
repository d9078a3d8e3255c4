# SPDX-License-Identifier: Apache-2.0
"""The words of a configuration for each format of models: its backend, its old platform name, its file.

Read by the drafts, to tell a backend from a platform or from the files that are there. Whether a backend can run here
is for `backends.table` to say.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """One format."""

    backend: str
    platform: str
    """What configurations wrote before there was `backend`; "" when there never was one."""
    filename: str
    """The file or folder in the version folder, unless the configuration names another; "" when there is none."""


FORMATS = (
    Format("onnxruntime", "onnxruntime_onnx", "model.onnx"),
    Format("python", "", "model.py"),
    Format("tensorflow", "tensorflow_savedmodel", "model.savedmodel"),
    Format("tensorflow", "tensorflow_graphdef", "model.graphdef"),
    Format("pytorch", "pytorch_libtorch", "model.pt"),
    Format("tensorrt", "tensorrt_plan", "model.plan"),
    Format("netdef", "caffe2_netdef", "model.netdef"),
    Format("ensemble", "ensemble", ""),
    Format("identity", "", ""),
)
