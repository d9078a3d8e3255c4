# SPDX-License-Identifier: Apache-2.0
"""Where services run: `contract` is what a platform does for them, and there is a driver for each.

The drivers are `process`, `docker`, `slurm`, `kubernetes`, `lepton` and `brev`. `jobs` uses them and keeps its own records.
For people there is `launcher`: it plans a service (`catalogue`, `images`, `payloads`, `variables`), records it (`registry`)
and asks it (`readiness`, `asking`). Nothing here knows of users or of HTTP servers.
"""
