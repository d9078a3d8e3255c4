# SPDX-License-Identifier: Apache-2.0
"""TensorRT Inference Server's own protocol, before Triton: that of 0.7 to 0.10 ("v0") and of 0.11 to 1.x ("v1").

Both are spoken on the same paths, and told apart by what a request's header says: sizes in bytes are v0's, dimensions
v1's. Translates and nothing more.

Over HTTP: `http` and `http_control`. Over gRPC: `grpc`, `streams` and `envelopes`. Both: `headers` reads what a request
says of itself, `decoding` makes a request for the engine of it, `encoding` writes the answer; `status` describes the
server; `accounts` has the server's name and the one counter of requests; `shared_memory` is what is asked of regions.
"""
