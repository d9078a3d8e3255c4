# SPDX-License-Identifier: Apache-2.0
"""The options of `headrace serve`: command line, environment and YAML file, each value with its origin.

`option_table` lists every option; reading, merging, help, `config show` and the documentation follow from it.
"""
