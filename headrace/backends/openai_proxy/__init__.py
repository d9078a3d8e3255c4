# SPDX-License-Identifier: Apache-2.0
"""The backend `openai_proxy`: models that another engine serves (vLLM, SGLang, llama.cpp), behind our names.

`backend` is what the engine calls. `settings` reads the parameters; `engine` keeps the other engine alive: `child` is its
process, `origin` its address; `client` speaks HTTP to it, `events` reads what it streams; `requests` says ours in its words,
`answers` its answers in ours; `instance` brings the two together.
"""
