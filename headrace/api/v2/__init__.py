# SPDX-License-Identifier: Apache-2.0
"""The Open Inference Protocol (v2) with Triton's binary tensors. Translates and nothing more.

Over HTTP: `http` and `json_codec`. Over gRPC: `grpc` and `grpc_codec`. `layouts` is what both remember.
"""
