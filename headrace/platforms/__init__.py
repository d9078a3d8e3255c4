# SPDX-License-Identifier: Apache-2.0
"""Run services as processes, or on Docker, Slurm, Kubernetes, Lepton or Brev.

`contract` defines a platform driver; each platform has one. `launcher` plans, starts and registers services, and sends
requests to them. The local fleet uses `processes`, `commands`, `log_files`, `node_resources` and `docker` too. Nothing here
knows users or HTTP servers.
"""
