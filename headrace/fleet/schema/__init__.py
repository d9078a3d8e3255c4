# SPDX-License-Identifier: Apache-2.0
"""The kinds as tables, and what follows from the tables: checks, defaults, CRDs, reference pages.

Lives here: the tables in `kinds`, one row a field, and functions that walk them. A rule that needs two fields or another
document stands in `admission`.
"""

from headrace.fleet.schema.checking import check, check_status, doubts
from headrace.fleet.schema.defaulting import defaulted

__all__ = ["check", "check_status", "defaulted", "doubts"]
