# SPDX-License-Identifier: Apache-2.0
"""The load generator of `headrace bench` and `headrace tune`.

It talks to a server from outside, over the same protocols as any client.
"""

from __future__ import annotations
