# SPDX-License-Identifier: Apache-2.0
"""WebSocket (RFC 6455, with permessage-deflate) on a connection that `http1` hands over.

A route's handler calls `accept.accept(exchange, on_open)`; then a `connection.WebSocketConnection` owns the socket.
Frames and negotiation are the `websockets` package's, without its I/O; order, time, limits, back-pressure are here.
May not live here: HTTP parsing, what messages mean, authentication (a handler asks before it accepts).
"""
