# SPDX-License-Identifier: Apache-2.0
"""`import load_fakes` and the helpers of the whole tests tree work from the tests beside this file."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
