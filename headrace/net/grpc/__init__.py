# SPDX-License-Identifier: Apache-2.0
"""gRPC on HTTP/2: calls of all four kinds, deadlines, metadata, compression, status, health and reflection.

`call` is the callback form that the hot path uses; `streaming` lets a coroutine serve a call; `services` is the table
of methods. May not live here: what a method does, apart from `health` and `reflection`, which every server has.
"""
