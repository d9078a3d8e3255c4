# SPDX-License-Identifier: Apache-2.0
"""Network protocols on sockets: HTTP/1.1, HTTP/2, gRPC, WebSocket, TLS, listening and draining.

`http` is what a handler sees, whatever the protocol version; `http1`, `http2`, `grpc` and `websocket` are the protocols;
`server` puts them on sockets. No tensors, no models and no JSON here, and no coroutine for a plain request.
"""
