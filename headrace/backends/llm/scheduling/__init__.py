# SPDX-License-Identifier: Apache-2.0
"""Which tokens of which sequences are computed next, and in which pages their keys and values lie. Knows no torch."""
