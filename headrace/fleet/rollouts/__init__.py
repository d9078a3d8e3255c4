# SPDX-License-Identifier: Apache-2.0
"""Rollouts by steps: a new revision gets more and more of the requests, and all of them or none in the end.

Pure, and the same for a cluster and for one machine. `policy` reads what a service asks for, `state` how far it is,
`counts` what routers saw of each revision; `deciding` says what follows from the three, `advancing` makes the next state of
it, and `looking` is how a controller calls that. The state stands in `status.components.NAME.rollout`, so that whoever is
killed in a step finds it again; `planning` reads the share of the requests there. May not live here: who asks routers, who
writes the status, and how requests are split.
"""
