# SPDX-License-Identifier: Apache-2.0
"""Computes steps: a model of transformers over keys and values in pages. Knows no request and no text."""
