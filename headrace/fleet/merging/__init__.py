# SPDX-License-Identifier: Apache-2.0
"""Merging: combine a runtime and a service into the pods of each component.

`merge_components` is the entry point. Every field of a pod has an origin: runtime, service, accelerator or default.
"""

from __future__ import annotations

from headrace.fleet.merging.component_specs import Component, Extension
from headrace.fleet.merging.components import merge_components

__all__ = ["Component", "Extension", "merge_components"]
