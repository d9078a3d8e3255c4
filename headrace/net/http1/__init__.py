# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 on a socket: llhttp (through httptools) reads requests, `protocol` keeps order and time, `exchange` answers.

May not live here: routing decisions, HTTP/2, WebSocket frames (a connection is handed over by `take_over`).
"""
