# SPDX-License-Identifier: Apache-2.0
"""Every kind of `ome.io/v1beta1` that we have, as a table. Nothing but tables lives here."""

from headrace.fleet.schema.kinds.table import KINDS, find_kind

__all__ = ["KINDS", "find_kind"]
