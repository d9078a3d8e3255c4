# SPDX-License-Identifier: Apache-2.0
"""Traffic splits: choose the version for requests that name none, by weight or sticky key, with shadows and rollback.

A split takes the place of the newest version in the engine's directory, so it works for every protocol, and a model without
a split pays nothing. Knows no protocol.
"""
