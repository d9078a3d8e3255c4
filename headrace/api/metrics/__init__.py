# SPDX-License-Identifier: Apache-2.0
"""Metrics for Prometheus: `GET /metrics`, with Triton's names, those of its first releases and a few of our own.

It reads the engine's statistics, the metrics that models report, and the machine; it counts nothing itself. The
counting is in `engine.statistics`, the text formats are in `core.telemetry.exposition`.
"""
