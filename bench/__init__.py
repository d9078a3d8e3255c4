# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of Headrace beside other servers; README.md in this folder describes them."""
