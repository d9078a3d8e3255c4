# SPDX-License-Identifier: Apache-2.0
"""The backend `llm`: language models, vision-language models and embedding models of Hugging Face folders, on PyTorch.

backend        what the server's engine calls; creates the parts below
instance       takes requests, returns replies; `requests` parses them, `request_state` streams their text
engine_core    the thread that runs steps: `scheduler` and `page_pool` choose the tokens, `model_runner` computes them,
`sampling` picks the next ones
tokenizer      with `chat_template` and `detokenizer`
lora, vision, kv_transfer, embedding
"""

from headrace.core.privacy import refuse_telemetry

refuse_telemetry()
