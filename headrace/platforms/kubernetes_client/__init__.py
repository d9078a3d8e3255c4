# SPDX-License-Identifier: Apache-2.0
"""A small Kubernetes client library: API calls, informers, a work queue and leader election, on plain JSON objects.

Used by the operator, the model agent, the router, the Kubernetes platform and the commands of `headrace` that talk to a
cluster. lightkube reads the kubeconfig and logs in; its typed objects are not used: they drop fields they do not know.
"""
