# SPDX-License-Identifier: Apache-2.0
"""A lock for libraries that change what the whole process does while they work. Held by backends around such calls."""

from __future__ import annotations

from threading import Lock

TRANSFORMERS = Lock()
"""While the library transformers makes a model: what it sets for new tensors holds for all threads."""
