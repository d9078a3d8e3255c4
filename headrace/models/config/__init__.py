# SPDX-License-Identifier: Apache-2.0
"""What a model's configuration says: `config.pbtxt` (or `.json`, `.yaml`) read, checked, completed and typed.

Lives here: the ModelConfig schema with Triton's field numbers, the readers, the defaults, the checks, and the typed
classes that the engine and the backends work with. May not live here: loading a model, or anything that runs one.
"""
