# SPDX-License-Identifier: Apache-2.0
"""Model configuration: `config.pbtxt` (or `.json`, `.yaml`) parsed, completed, validated and typed.

Has the ModelConfig schema with Triton's field numbers, the parsers, the defaults, the checks, and the typed classes
that the engine and the backends use. Loads and runs no model.
"""
