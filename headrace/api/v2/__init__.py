# SPDX-License-Identifier: Apache-2.0
"""The Open Inference Protocol (v2) with Triton's extensions.

Over HTTP: `http`, `http_codec` and `generate`; over gRPC: `grpc`, `grpc_codec` and `grpc_stream`. `models`, `repository` and
`server_control` have the remaining routes and methods of both transports; `shared_state` is what they share.
"""
