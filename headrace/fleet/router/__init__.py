# SPDX-License-Identifier: Apache-2.0
"""The balancing proxy: which server gets a request, and how it gets there and back.

Put together by `apps.router`. Knows the wire, and nothing of models: whatever speaks HTTP can stand behind it.
"""
