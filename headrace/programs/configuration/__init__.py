# SPDX-License-Identifier: Apache-2.0
"""The configuration of `headrace serve`: YAML file, environment and options, each value with its origin.

`keys` lists every key; reading, merging, `config show` and the documentation follow from it.
"""
