# SPDX-License-Identifier: Apache-2.0
"""The `headrace` command: options, output tables and progress bars.

A command imports its dependencies when it runs, so that `--help` is quick. Code that works without a terminal belongs
elsewhere.
"""
