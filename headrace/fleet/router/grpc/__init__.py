# SPDX-License-Identifier: Apache-2.0
"""gRPC through the router: each call goes to a backend of its own, byte for byte.

    grpc = GrpcProxy(backends, settings, budget=budget)    # those of `router.proxy.RouterProxy`, which ticks them
    site = Site(routes, services=grpc.services, limits=limits)
    grpc.start()                                           # before the server accepts connections
    ...
    await grpc.close()                                     # after the servers have drained

Methods added to `grpc.services` (health, reflection) are answered by the router itself, all others are proxied. Requests
over HTTP/2 that are not gRPC go to the site's routes. Messages are not parsed.
"""
