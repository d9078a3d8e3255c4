# SPDX-License-Identifier: Apache-2.0
"""The tools of other folders that these tests use: raw requests, a server to treat badly, the job API, stubs."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1]

sys.path.insert(0, str(Path(__file__).parent))
for _folder in ("api/openapi", "api/jobs", "storage", "router"):
    sys.path.append(str(_TESTS / _folder))
