# SPDX-License-Identifier: Apache-2.0
"""The Caffe2 backend: nets are translated to ONNX graphs and run by ONNX Runtime.

`backend` is the entry point. `files` reads the two files of a model, `operators/` translates each operator,
`operators/table` lists them by name, `graph` builds the ONNX graph, and `translation` translates a net. Caffe2 itself
no longer exists: the tests compare the translations with PyTorch's layers. `backends.onnx` runs the result.
"""
