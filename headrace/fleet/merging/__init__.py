# SPDX-License-Identifier: Apache-2.0
"""Merging: what a runtime offers and what a service asks for, made into the pods of each component.

Pure. `components` is the way in; every field of a pod has an origin: runtime, service, accelerator or default.
"""

from __future__ import annotations

from headrace.fleet.merging.components import components
from headrace.fleet.merging.parts import Component, Extension

__all__ = ["Component", "Extension", "components"]
