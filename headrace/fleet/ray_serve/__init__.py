# SPDX-License-Identifier: Apache-2.0
"""Run an InferenceService on a Ray cluster: Ray Serve places, scales and replaces the replicas.

A replica runs one server, or a group of servers that compute one model over several nodes.

    translation      an InferenceService as settings for Ray Serve, or what cannot run there; pure
    replica_spec     these settings, and the options of the Ray Serve deployment; pure
    server_process   the server of a replica: a child process on the replica's node
    forwarding       one HTTP request, forwarded to the server
    workers          the other servers of a group: an actor for each, on other nodes
    replica          the class that Ray Serve runs: starts, checks, drains and replaces its server
    application      the Ray Serve application, for `serve.run`, `serve run` and Serve config files
    cluster          connect to a Ray cluster; deploy, list and delete services

Only `application`, `cluster` and `workers` import the package `ray`. Headrace has to be installed on every node of the
cluster.
"""
