# SPDX-License-Identifier: Apache-2.0
"""What happens to a document on its way in: defaults that need other documents, and rules that no table can hold.

Called by the webhooks, by `planning` before it plans, by `headrace explain` and `headrace apply`. Tells all that is wrong at
once. May not live here: whether a runtime can serve a model (`selection`).
"""

from headrace.fleet.admission.checking import problems
from headrace.fleet.admission.defaulting import defaulted

__all__ = ["defaulted", "problems"]
