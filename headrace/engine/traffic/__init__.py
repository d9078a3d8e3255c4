# SPDX-License-Identifier: Apache-2.0
"""Which version of a model answers a request that names none: splits by weight, sticky keys, shadows, rollback.

Stands in for the newest version in the engine's directory, so every protocol takes part and a model without a split pays
nothing. Knows no protocol.
"""
