# SPDX-License-Identifier: Apache-2.0
"""TensorRT Inference Server's own protocol, before Triton: that of 0.7 to 0.10 ("v0") and of 0.11 to 1.x ("v1").

Both generations use the same paths; the header of a request shows which it is: sizes in bytes are v0's, dimensions v1's.

`headers` parses a request's header, `requests` decodes it for the engine, `responses` encodes the response; `http` and
`grpc` are the transports; `status` has the server's status and the counters of requests.
"""
