# SPDX-License-Identifier: Apache-2.0
"""What a handler sees of HTTP: an exchange (one request and its response), heads, routes, statuses, content coding.

May not live here: sockets, frames, anything that differs between HTTP/1.1 and HTTP/2; those rooms implement `Exchange`.
"""
