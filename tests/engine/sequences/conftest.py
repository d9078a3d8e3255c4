# SPDX-License-Identifier: Apache-2.0
"""What the tests of sequences share."""

from __future__ import annotations

import sys
from pathlib import Path

# `import sequence_fakes` works from this folder: it is a tool of its tests.
sys.path.insert(0, str(Path(__file__).parent))
