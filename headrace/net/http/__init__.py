# SPDX-License-Identifier: Apache-2.0
"""HTTP as a handler sees it: an exchange (one request and its response), heads, routes, statuses, content coding.

No sockets, frames, or anything that differs between HTTP/1.1 and HTTP/2: `http1` and `http2` implement `Exchange`.
"""
