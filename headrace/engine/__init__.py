# SPDX-License-Identifier: Apache-2.0
"""Models and requests: who computes a request, with whom, and when. Knows no protocol.

Lives here: the repository of models, their schedulers and instances, ensembles, cache and statistics, and the data plane
that every protocol calls. May not live here: HTTP, gRPC, JSON, sockets; and what a format of models needs (`backends`).
"""
