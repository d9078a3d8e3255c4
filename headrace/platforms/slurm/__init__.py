# SPDX-License-Identifier: Apache-2.0
"""The driver `slurm`: services as batch jobs of a cluster, from one of its machines or over ssh."""
