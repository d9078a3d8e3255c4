# SPDX-License-Identifier: Apache-2.0
"""Where the tools of these tests are: beside them, and with the tests of the backends and of language models."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("backends", "language_models", "console"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
