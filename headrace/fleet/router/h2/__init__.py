# SPDX-License-Identifier: Apache-2.0
"""gRPC through the router: each call of any client goes to a backend of its own choice, byte for byte.

Attached by `apps.router`, in the loop that serves:

    grpc = GrpcProxy(backends, settings, budget=budget)    # of `router.proxy.RouterProxy`, which ticks them
    site = Site(routes, services=grpc.services, limits=limits)
    grpc.start()                                           # before the server accepts: the once-a-second sweep
    ...
    await grpc.close()                                     # after the servers have drained

`grpc.services` is a `wire.grpc.Services`: methods added to it (health, reflection) are answered by the router itself, all
others are passed on. Requests over HTTP/2 that are not gRPC go to the site's routes, as ever.

    call          a client's call: chooses a backend, tries again where that is safe, sends what the client sends
    answering     its base: what comes back, to the client
    upstream      one attempt of a call, as a stream to its backend
    connection    an HTTP/2 connection to a backend, shared by the calls of many clients; its base is `sending`
    reader        what differs in the frames of a backend from those of a client
    pool          the connections to one backend, and who waits for one
    headers       header blocks from one side to the other, worked out once
    proxy         puts these together

May not live here: HTTP/1.1, the choice of a backend (`router.policies`), messages: nobody looks into the bytes.
"""
