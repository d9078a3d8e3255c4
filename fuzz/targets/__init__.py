# SPDX-License-Identifier: Apache-2.0
"""Targets: one module for each kind of reader. `table` has their names; each is imported when it is asked for."""
