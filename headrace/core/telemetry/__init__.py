# SPDX-License-Identifier: Apache-2.0
"""Logs, metrics, traces and progress events.

Programs create these objects and pass them on; importing this package sets nothing up. Each package declares its own metrics
on the registry it is given; `cli` draws bars and tables.
"""
