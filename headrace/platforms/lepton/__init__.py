# SPDX-License-Identifier: Apache-2.0
"""Services as endpoints of a DGX Cloud Lepton workspace, through its HTTP API. Knows no other platform."""
