# SPDX-License-Identifier: Apache-2.0
"""Admission: defaults and validation rules that need several fields or other documents.

Called by the webhooks, by `planning`, `headrace explain` and `headrace apply`. Reports all problems at once.
"""

from headrace.fleet.admission.defaults import with_defaults
from headrace.fleet.admission.validation import validate

__all__ = ["validate", "with_defaults"]
