# SPDX-License-Identifier: Apache-2.0
"""Translations of Caffe2's operators to ONNX, one module per family; `table` lists them by name.

A translator takes an `Operator` and the `Graph`, and adds nodes. It reads inputs with `operator.read` and sets outputs
with `operator.write`. It rejects what it cannot express, by `Operator.fault`: a net is translated exactly or not at
all.
"""
