# SPDX-License-Identifier: Apache-2.0
"""The backend `openai_proxy`: models that another engine serves (vLLM, SGLang, llama.cpp), under our names.

backend    what the server's engine calls
settings   the parameters of a model configuration
engine     the upstream engine: its process, health checks and restarts
client     asyncio HTTP/1.1 and Server-Sent Events
protocol   our requests as OpenAI requests, and OpenAI responses as ours
instance   forwards requests and returns the responses
"""
