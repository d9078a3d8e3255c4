# SPDX-License-Identifier: Apache-2.0
"""`import launched_programs` works from here, and in what is started."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
