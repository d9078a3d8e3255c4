# SPDX-License-Identifier: Apache-2.0
"""TAO's job API over HTTP: `/api/v1`, and the part of `/api/v2` that NVIDIA's newest client uses.

Translates between HTTP and `jobs.service`; inference requests are proxied with the router's connections.
"""
