# SPDX-License-Identifier: Apache-2.0
"""Selection: which runtime serves a model, which accelerator it runs on, and why not the others.

Pure. Knows documents, not pods: what is made of a choice is merging's.
"""

from __future__ import annotations

from headrace.fleet.selection.index import Rejection
from headrace.fleet.selection.runtimes import Selection, select

__all__ = ["Rejection", "Selection", "select"]
