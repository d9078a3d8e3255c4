# SPDX-License-Identifier: Apache-2.0
"""Metrics for Prometheus: `GET /metrics`, with Triton's names, those of its first releases and a few of our own.

`http.Metrics` answers scrapes; `settings` says what is in them. Reads what the engine counts anyway, what models report
of themselves, and the machine; counts nothing itself. May not live here: the numbers' keeping (`engine.statistics`), the
text formats (`telemetry.exposition`), ports (`apps`).
"""
