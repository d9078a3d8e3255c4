# SPDX-License-Identifier: Apache-2.0
"""Types that every package shares: tensors, requests, errors, limits, the clock; logs and metrics.

Small values and pure functions, on numpy and the standard library; `telemetry` has logs, metrics, traces and progress.
Imports no other package.
"""
