# SPDX-License-Identifier: Apache-2.0
"""HTTP/2 (RFC 9113): frames, header blocks, streams, flow control, and limits against floods.

`reader` reads frames, `connection` opens streams, `stream` is the base of everything that answers a request: `exchange`
here and `grpc.call` above. No gRPC, no routing and no HTTP/1.1 in this package.
"""
