# SPDX-License-Identifier: Apache-2.0
"""Rollouts by steps: a new revision gets a growing share of the requests, and in the end all or none.

Pure, and the same for a cluster and for a local fleet. `policy` parses a service's annotations, `revision_stats` the
statistics of the routers, `state` the progress; `controller` computes the next state. The state is stored in
`status.components.NAME.rollout`, so that a restarted controller continues it; `planning` reads the traffic share from there.
"""
