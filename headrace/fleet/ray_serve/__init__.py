# SPDX-License-Identifier: Apache-2.0
"""Run an InferenceService on a Ray cluster: Ray Serve places, scales and replaces the replicas, each runs one server.

    translation      an InferenceService as settings for Ray Serve, or what cannot run there; pure
    replica_spec     these settings, and the options of the Ray Serve deployment; pure
    server_process   the server of a replica: a child process on the replica's node
    forwarding       one HTTP request, forwarded to the server
    replica          the class that Ray Serve runs: starts, checks, drains and replaces its server
    application      the Ray Serve application, for `serve.run`, `serve run` and Serve config files
    cluster          connect to a Ray cluster; deploy, list and delete services

Only `application` and `cluster` import the package `ray`. Headrace has to be installed on every node of the cluster.
"""
