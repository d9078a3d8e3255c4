# SPDX-License-Identifier: Apache-2.0
"""The inference server: one process or several workers, every protocol, until a signal.

`server` is the program of one process; `supervisor` starts several, `worker`, `worker_channel`, `worker_stats` and
`broadcast` let them act as one server; `protocols` adds the routes, `access_guard` checks who may use them; `asgi` is
the server without ports.
"""
