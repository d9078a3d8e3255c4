# SPDX-License-Identifier: Apache-2.0
"""The driver `kubernetes`: services as Jobs or StatefulSets of a cluster, each with a Service and a Secret that it owns."""
