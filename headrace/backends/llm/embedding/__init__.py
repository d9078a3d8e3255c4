# SPDX-License-Identifier: Apache-2.0
"""Embedding models: text to vectors. Knows nothing of generation: no KV cache, scheduler or sampling."""
