# SPDX-License-Identifier: Apache-2.0
"""The controller: keeps the objects of a cluster as `planning` wants them, and each service's status as `status` tells it.

`Controller` is put together by `program`, for `headrace operator run`. Lives here: what is read of the API server and kept
(`following`), what is written to it (`applying`, `reconciling`, `events`, `leading`), and the manifests of the operator
itself. May not live here: what should be, which is `planning`'s, and what a sight means, which is `status`'s.

**Why no kopf.** Its handlers keep their progress, the last state they saw and their finalizers on the object itself: each
is a write of its own, and a controller that has nothing to do must not write. With those storages off, what is left of it is
a watch (`on.event`) with an HTTP client of its own beside lightkube's, peers that elect each other by a custom resource in
place of a Lease, and no order between the objects of one service. The queue and the watches here are less than what it would
take to talk it out of the rest.

**Why no finalizer.** Every object we make is owned by its service, so that Kubernetes removes it; nothing of a service is
outside the cluster. A finalizer would only keep deletions waiting for us. Those that OME left are taken away.
"""
