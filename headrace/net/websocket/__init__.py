# SPDX-License-Identifier: Apache-2.0
"""WebSocket (RFC 6455, with permessage-deflate) on a connection that HTTP/1.1 gives up.

A route's handler calls `handshake.accept(exchange, on_open)`; then a `connection.WebSocketConnection` owns the socket.
The `websockets` package handles frames and negotiation, without its I/O; order, timeouts, limits and flow control are
here. Handlers authenticate before they accept.
"""
