# SPDX-License-Identifier: Apache-2.0
"""The load generator behind `headrace bench` and `headrace tune`: makes requests, sends them on a schedule, sums up.

The verbs of the command line call it. It talks to a server from outside, over the same protocols as any client, and
knows nothing of how the server is built.
"""

from __future__ import annotations
