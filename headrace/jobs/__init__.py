# SPDX-License-Identifier: Apache-2.0
"""Jobs: organisations' workspaces, experiments, registered models and running services, and what is true of each.

`service` is the door, for `api.jobs`, the gateway and the command line. Knows no HTTP server and no engine.
"""
