# SPDX-License-Identifier: Apache-2.0
"""The backend `huggingface_vision`: image classifiers and object detectors of Hugging Face folders.

`backend` is what the engine calls. The rest is its own: `folder` reads what a folder says of itself and opens no weights,
`weights` loads them, `instance` computes, `settings` reads the parameters.
"""

from headrace.core.privacy import refuse_telemetry

refuse_telemetry()

from headrace.backends import torch_on_one_thread  # noqa: E402

__all__ = ["torch_on_one_thread"]
