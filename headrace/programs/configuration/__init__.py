# SPDX-License-Identifier: Apache-2.0
"""What a server is told by a YAML file, the environment and flags, each value with where it came from.

One table of keys, `table`, says all there is; reading, merging, showing and the documents are derived from it. `staging`
makes a repository of one model out of a path. Knows no command line: flags come in by their names.
"""
