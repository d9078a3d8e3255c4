# SPDX-License-Identifier: Apache-2.0
"""`import fleet_in_memory` works from the tests beside it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
