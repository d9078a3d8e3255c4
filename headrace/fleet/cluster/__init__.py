# SPDX-License-Identifier: Apache-2.0
"""The operator on Kubernetes: keeps the objects of each service as planned, and its status up to date.

`headrace.programs.operator` runs it. `view` caches the cluster, `reconciler` plans and applies one service, `apply` and
`diff` write its objects, `webhooks` answers the API server. `planning` decides which objects a service needs, and `status`
what their state means.

**Why no kopf.** Its handlers keep their progress, the last state and their finalizers on the object itself: each is a write,
and a controller that has nothing to do must not write. With those storages off, what remains is a watch (`on.event`) with
another HTTP client, peering by a custom resource instead of a Lease, and no order between the objects of one service. The
work queue and the informers of `kubernetes_client` are less code than turning the rest off.

**Why no finalizer.** Every object is owned by its service, so Kubernetes deletes it; nothing of a service is outside the
cluster. A finalizer would only delay deletions. Finalizers that OME left are removed.
"""
