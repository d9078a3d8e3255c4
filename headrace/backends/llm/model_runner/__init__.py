# SPDX-License-Identifier: Apache-2.0
"""Loads weights and computes steps of a transformers model over a paged KV cache. Knows no request and no text."""
