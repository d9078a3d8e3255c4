# SPDX-License-Identifier: Apache-2.0
"""HTTP/2 (RFC 9113) on a socket: frames, header blocks, streams, flow control, and defences against floods.

`connection` reads frames and keeps the connection's state; `stream` is the base of everything that answers a request:
`exchange` here, `grpc.call` above. May not live here: gRPC, routing, HTTP/1.1.
"""
