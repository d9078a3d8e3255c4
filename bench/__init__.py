# SPDX-License-Identifier: Apache-2.0
"""Headrace measured beside the servers people would use instead; see README.md in this folder."""
