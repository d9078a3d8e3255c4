# SPDX-License-Identifier: Apache-2.0
"""Where the tools of these tests are."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
