# SPDX-License-Identifier: Apache-2.0
"""Quantised weights: which schemes can be served, how checkpoints store them, and how they are loaded.

`schemes` and `checkpoint` decide before weights are read, and know no torch. `loading` and `repacking` turn the stored
tensors into the layers of `model_runner.quantized_linear`.
"""
