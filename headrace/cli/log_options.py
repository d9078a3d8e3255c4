# SPDX-License-Identifier: Apache-2.0
"""The two options about logs that every program of ours has."""

from __future__ import annotations

from typing import Annotated

import typer

_PANEL = "Logs"

LogLevel = Annotated[
    str, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error.", rich_help_panel=_PANEL)
]
LogStyle = Annotated[
    str, typer.Option("--log-format", metavar="FORMAT", help="auto, json or text.", rich_help_panel=_PANEL)
]
