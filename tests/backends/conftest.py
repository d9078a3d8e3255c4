# SPDX-License-Identifier: Apache-2.0
"""What the tests of backends share."""

from __future__ import annotations

import sys
from pathlib import Path

# `import onnx_graphs` works from the tests beside it.
sys.path.insert(0, str(Path(__file__).parent))
