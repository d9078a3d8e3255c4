# SPDX-License-Identifier: Apache-2.0
"""The models that `test_backend_contract.py` and `test_every_format_served.py` run: one module for each backend."""
