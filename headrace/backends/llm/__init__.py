# SPDX-License-Identifier: Apache-2.0
"""The backend `llm`: language models, vision-language models and embeddings of Hugging Face folders, on PyTorch."""

from headrace.core.privacy import refuse_telemetry

refuse_telemetry()
