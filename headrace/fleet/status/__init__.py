# SPDX-License-Identifier: Apache-2.0
"""The status of a service, computed from its objects and pods: conditions, revisions and the state of its model.

Called by the controllers of a cluster and of a local fleet, which both observe Kubernetes objects. Pure: time is an
argument, and the same observation gives the same status, so that nothing is written when nothing changed.

`service_status.build_status` is not re-exported here: a client that only reads conditions would import all of `planning`,
which takes a tenth of a second of every `headrace get`.
"""
