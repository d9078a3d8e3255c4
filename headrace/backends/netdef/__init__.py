# SPDX-License-Identifier: Apache-2.0
"""Caffe2's nets, translated to ONNX graphs, computed by ONNX Runtime.

`backend` is what the engine calls. `files` reads the two files of a model, `operators/` has the translation of each
operator and `operators/table` their names, `graph` is what they build, `translation` goes through a net. Caffe2 itself
is gone: what its operators compute is written down here, and held against PyTorch's layers by the tests. Computing is
left to `backends.onnx`.
"""
