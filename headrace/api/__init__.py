# SPDX-License-Identifier: Apache-2.0
"""The protocols of the inference server. Each translates between its messages and the engine.

`v2` is Triton's protocol, `v1` that of TensorRT Inference Server, `openai` and `predict` are HTTP APIs; `access` checks
API keys and limits. There is no batching, no model state and no socket here; protocols do not import each other.
"""
