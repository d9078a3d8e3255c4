# SPDX-License-Identifier: Apache-2.0
"""The verbs for a fleet, put together for `main`: get, describe, apply, delete, rollout."""

from __future__ import annotations

import typer

from headrace.cli.fleet_apply import apply
from headrace.cli.fleet_delete import delete
from headrace.cli.fleet_describe import describe
from headrace.cli.fleet_get import get
from headrace.cli.fleet_rollout import rollout


def add_fleet_verbs(app: typer.Typer) -> None:
    """Give an app the verbs."""
    for verb in (get, describe, apply, delete):
        app.command()(verb)
    app.add_typer(rollout)
