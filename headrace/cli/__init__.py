# SPDX-License-Identifier: Apache-2.0
"""The `headrace` command: verbs, tables, progress bars.

Each verb imports its room when it runs, so that `--help` is quick. May not live here: anything a program needs without a
terminal.
"""
