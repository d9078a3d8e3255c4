# SPDX-License-Identifier: Apache-2.0
"""Selection: which runtime serves a model, which accelerator class it runs on, and why the others are rejected."""

from __future__ import annotations

from headrace.fleet.selection.runtimes import Rejection, Selection, select

__all__ = ["Rejection", "Selection", "select"]
