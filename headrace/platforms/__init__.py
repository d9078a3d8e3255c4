# SPDX-License-Identifier: Apache-2.0
"""Run services as processes, or on Docker, Slurm, Kubernetes, Lepton or Brev.

`contract` is what a platform has to do, and there is a driver for each. `launcher` is for people: it plans a service, starts
it, records it and sends requests to it. Nothing here knows users or HTTP servers.
"""
