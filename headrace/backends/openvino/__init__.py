# SPDX-License-Identifier: Apache-2.0
"""The OpenVINO backend: models in OpenVINO IR or ONNX format, run by OpenVINO on the CPU.

`backend` is the entry point; `model` reads models, and imports the library without its telemetry.
"""
