# SPDX-License-Identifier: Apache-2.0
"""A program: calls NVIDIA's own `tao_sdk` as it is told on its input, a JSON object a line, and answers with one.

{"method": "list_workspaces", "arguments": {}} becomes {"result": [...]} or {"error": "TaoNotFoundError", "text": "..."}.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    from tao_sdk import TaoClient

    client = TaoClient()
    for line in sys.stdin:
        call: dict[str, Any] = json.loads(line)
        told: dict[str, Any]
        try:
            told = {"result": getattr(client, call["method"])(**call["arguments"])}
        except Exception as error:
            told = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
