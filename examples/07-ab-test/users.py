# SPDX-License-Identifier: Apache-2.0
"""Four hundred users, one request each: `python users.py URL`. Says how many each version answered."""

import json
import sys
from collections import Counter
from urllib.request import Request, urlopen


def ask(user: str) -> str:
    """The version that answers this user."""
    body = {"inputs": [3, 80], "user": user}
    with urlopen(Request(f"{sys.argv[1]}/predict", json.dumps(body).encode())) as answer:  # noqa: S310
        return json.load(answer)["model_version"]


seen = Counter(ask(f"user-{number}") for number in range(400))
print(", ".join(f"{version}: {seen[version]}" for version in sorted(seen)))
print("ann gets", {ask("ann") for _ in range(20)})
