# SPDX-License-Identifier: Apache-2.0
"""The Open Inference Protocol (v2) with Triton's extensions. Translates and nothing more.

Over HTTP: `http` and `json_codec`, and a module for each group of routes. Over gRPC: `grpc` and `grpc_codec`, and the
modules that begin with `grpc_`. What both have in common is in `shared`, what they remember in `layouts`.
"""
