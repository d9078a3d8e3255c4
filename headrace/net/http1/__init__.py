# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1: llhttp (through httptools) parses requests, `connection` keeps order and timeouts, `exchange` answers.

No routing decisions, HTTP/2 or WebSocket frames here; `Http1Exchange.take_over` gives a connection to another protocol.
"""
