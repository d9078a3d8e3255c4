# SPDX-License-Identifier: Apache-2.0
"""Models in ONNX's format, computed by ONNX Runtime.

`backend` is what the engine calls; `settings`, `session`, `reading` and `graph_cache` are its own. Nothing else of
Headrace is imported here but the room's contract, the signature and the configuration.
"""

from headrace.core.privacy import refuse_telemetry

refuse_telemetry()
