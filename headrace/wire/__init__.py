# SPDX-License-Identifier: Apache-2.0
"""Bytes on sockets: HTTP/1.1, WebSocket, HTTP/2, gRPC, TLS, listening and draining. Knows no model.

Sub-rooms, each below the next: `http` (what a handler sees, whatever the protocol version), `http1`, `http2`, `grpc` on
`http2`, `websocket` on `http1`, `asgi` on `http`; `server` puts them on sockets.
Lives here: parsing, framing, flow control, limits, time-outs, connection states.
May not live here: tensors, model names, JSON bodies, authentication. Nothing here starts a coroutine for a plain request.
"""
