# SPDX-License-Identifier: Apache-2.0
"""The router: a load-balancing reverse proxy for HTTP and gRPC.

It knows HTTP and nothing of models: any server that speaks HTTP can be a backend. `programs.router` runs it. A request
passes `proxied_request` (or `grpc.proxy`), which asks `backends` or `chooser` for a backend and sends it on a connection of
`upstream`.
"""
