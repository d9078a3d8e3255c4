# SPDX-License-Identifier: Apache-2.0
"""Models in OpenVINO's IR, or ONNX's format, computed by OpenVINO on the CPU.

`backend` is what the engine calls; `settings`, `reading` and `quiet` are its own.
"""
