# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of language models: Headrace, vLLM and SGLang over HTTP, with the same model and the same requests."""
