# SPDX-License-Identifier: Apache-2.0
"""`import gateway_process` works from here: tools of these tests. Models and pictures are the microservice's, the
bucket is that of storage."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
for room in ("microservice", "storage"):
    sys.path.insert(0, str(Path(__file__).parents[1] / room))
