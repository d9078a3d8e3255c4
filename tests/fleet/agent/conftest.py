# SPDX-License-Identifier: Apache-2.0
"""`import agent_site`, and the stores of the tests of storage, work from here."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "cluster"), str(HERE.parents[1] / "storage")]
