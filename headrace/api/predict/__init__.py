# SPDX-License-Identifier: Apache-2.0
"""`/predict`: a simple API, numbers in and numbers out, over HTTP, WebSocket and gRPC.

A request has values without a batch dimension, data types or tensor names where the model makes them obvious.
"""
