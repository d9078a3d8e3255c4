# SPDX-License-Identifier: Apache-2.0
"""The one place the version is written. Read by the build and by `headrace --version`."""

__version__ = "0.1.0.dev0"
