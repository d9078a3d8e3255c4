# SPDX-License-Identifier: Apache-2.0
"""`/predict`: numbers in, numbers out, over HTTP, WebSocket and gRPC.

For people who want an answer and not a protocol. Translates to the data plane, which knows nothing of it.
"""
