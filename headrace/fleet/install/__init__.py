# SPDX-License-Identifier: Apache-2.0
"""The manifests that install Headrace on a cluster: RBAC, the operator, the model agent and their settings.

`headrace operator manifests` prints them, and `scripts/generate_chart.py` generates the Helm chart from the same objects.
Each program has its own ServiceAccount with the permissions it needs, and no more.
"""
