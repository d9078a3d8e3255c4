# SPDX-License-Identifier: Apache-2.0
"""Fuzz targets: one module per kind of parser. `table` lists them by name; each is imported when it is needed."""
