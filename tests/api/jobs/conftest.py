# SPDX-License-Identifier: Apache-2.0
"""`import job_api` works from here: tools of these tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
