# SPDX-License-Identifier: Apache-2.0
"""The status of a service: what was seen of its objects and pods, as conditions, revisions and the state of its model.

Called by the controller on Kubernetes and by the one of this machine, which both show what they see as Kubernetes objects.
Pure: time is a parameter, and the same sight gives the same status, so that nothing is written when nothing changed. May not
live here: what should be (`planning`).

The way in is `document.status`. It is not repeated here: a client that only reads conditions would import all of `planning`,
which is a tenth of a second of every `headrace get`.
"""
