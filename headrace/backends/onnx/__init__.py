# SPDX-License-Identifier: Apache-2.0
"""The ONNX backend: models in ONNX format, run by ONNX Runtime.

`backend` is the entry point; `session` opens sessions, `model_file` reads a graph without its weights, `graph_cache`
keeps optimised graphs.
"""

from headrace.core.privacy import refuse_telemetry

refuse_telemetry()
