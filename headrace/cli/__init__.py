# SPDX-License-Identifier: Apache-2.0
"""The `headrace` command: arguments, tables and progress bars.

A command imports what it needs when it runs, so that `--help` is quick. Nothing here is needed without a terminal.
"""
