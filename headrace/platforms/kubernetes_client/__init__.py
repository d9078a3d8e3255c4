# SPDX-License-Identifier: Apache-2.0
"""A small Kubernetes client library: API calls, informers, a work queue and leader election, on plain JSON objects.

Used by the operator, the model agent, the router, the Kubernetes platform and the commands of `headrace` that talk to a
cluster. It is the only client of API servers here; docs/decisions/0014 says why there is no library in its place.
"""
