# SPDX-License-Identifier: Apache-2.0
"""`import chaos_crowd` and its neighbours work from the tests of this folder; so do processes of other rooms' tests."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1]
for _folder in ("chaos", "gateway", "microservice", "storage"):
    if str(_TESTS / _folder) not in sys.path:
        sys.path.insert(0, str(_TESTS / _folder))
