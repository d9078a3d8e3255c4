# SPDX-License-Identifier: Apache-2.0
"""`import batch_tools` works from here, and so do the pictures of the microservice's tests."""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / "microservice")]
