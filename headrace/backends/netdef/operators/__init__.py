# SPDX-License-Identifier: Apache-2.0
"""What each operator of Caffe2 is in ONNX, one file for each family; `table` has them by name.

A translator takes an `Operator` and the `Graph`, and adds nodes. It reads with `arity.read` and writes with
`arity.write`. What it cannot express it refuses, by `Operator.fault`: a net is served right or not at all.
"""
