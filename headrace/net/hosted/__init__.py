# SPDX-License-Identifier: Apache-2.0
"""Our routes as an ASGI application, for those who must run under uvicorn, gunicorn or another server's roof.

The other way round than `wire.asgi`: there, an application is a handler of ours; here, our handlers are an application.
Slower than our own connections, because every request becomes a coroutine and a handful of dictionaries.
"""
