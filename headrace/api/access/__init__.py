# SPDX-License-Identifier: Apache-2.0
"""Access control: API keys, rate limits, limits on requests in flight; users, roles, tokens and the audit log.

The guards of `programs.serve` and the job API call it before a handler runs. It knows no transport and no model.
"""
