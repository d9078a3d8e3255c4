# SPDX-License-Identifier: Apache-2.0
"""Scheduling: pending requests, their queues, the dynamic batcher, the rate limiter and the scheduler.

Decides which queued requests are computed next, in which batch and on which instance. Does not touch tensors, threads or
files.
"""
