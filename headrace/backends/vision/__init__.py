# SPDX-License-Identifier: Apache-2.0
"""The backend `huggingface_vision`: image classifiers and object detectors from Hugging Face folders.

`backend` is the entry point and runs the models; `model_folder` reads a folder's config.json and weights.
"""

from headrace.core.privacy import refuse_telemetry

refuse_telemetry()

from headrace.backends import torch_import  # noqa: E402

__all__ = ["torch_import"]
