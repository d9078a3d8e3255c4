# SPDX-License-Identifier: Apache-2.0
"""Where services run: one driver for each platform behind one contract. Used by `headrace.jobs`; knows no records."""
