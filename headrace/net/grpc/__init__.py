# SPDX-License-Identifier: Apache-2.0
"""gRPC on HTTP/2: calls of all four kinds, deadlines, metadata, compression, status, health and reflection.

`call` is the callback interface that the hot path uses; `services` has the table of methods and the coroutine interface.
What a method does belongs to other packages, except for `standard_services`.
"""
