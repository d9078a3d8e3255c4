# SPDX-License-Identifier: Apache-2.0
"""TAO's job API over HTTP: `/api/v1`, and what NVIDIA's newest client needs of `/api/v2`.

Translates between requests and `jobs.service`; inference is passed on to the service by the router's connections. May not
live here: what a job is, where it runs, who may do what.
"""
