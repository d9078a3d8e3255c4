# SPDX-License-Identifier: Apache-2.0
"""What Headrace is installed with on a cluster: rights, programs and settings, as objects. Pure.

`cluster.manifests` puts them together for `headrace operator manifests`, and `scripts/generate_chart.py` makes the Helm
chart of the same objects, so that the two cannot differ. Each program has an account of its own, with what it needs and no
more. May not live here: what the programs do, which is `cluster`'s and `agent`'s.
"""
