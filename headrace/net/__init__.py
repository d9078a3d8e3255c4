# SPDX-License-Identifier: Apache-2.0
"""Network protocols: HTTP/1.1, HTTP/2, gRPC, WebSocket, TLS; listening and draining.

`http` is what a handler sees, whatever the protocol version; `http1`, `http2`, `grpc` and `websocket` are the protocols;
`server` listens on sockets. No tensors and no models here, and no coroutine for a plain request.
"""
