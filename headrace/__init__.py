# SPDX-License-Identifier: Apache-2.0
"""Headrace serves machine-learning models: from a folder on a laptop to a fleet on Kubernetes."""

from headrace.version import __version__

__all__ = ["__version__"]
