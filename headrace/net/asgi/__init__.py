# SPDX-License-Identifier: Apache-2.0
"""A bridge for ordinary ASGI 3 applications (Starlette and the like): `routes.mount("/admin", AsgiApp(app).handle)`.

For what may be comfortable instead of fast: admin pages, jobs, a console. One task per request, on `Exchange` alone, so
it works over HTTP/1.1 and HTTP/2 alike; WebSockets through `wire.websocket`.
May not live here: sockets, frames, anything on the infer path.
"""
