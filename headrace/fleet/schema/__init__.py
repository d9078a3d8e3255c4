# SPDX-License-Identifier: Apache-2.0
"""Schemas of our custom resources as tables: validation, defaults, CRDs and reference pages are generated from them.

`kinds` has the tables, one row per field. Rules that need two fields or another document are in `admission`.
"""

from headrace.fleet.schema.validation import validate, validate_status, warnings, with_defaults

__all__ = ["validate", "validate_status", "warnings", "with_defaults"]
