# SPDX-License-Identifier: Apache-2.0
"""Headrace beside vLLM and SGLang: language models through HTTP, the same folder and the same requests for each."""
