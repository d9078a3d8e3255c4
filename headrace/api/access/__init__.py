# SPDX-License-Identifier: Apache-2.0
"""Who may ask, and how much: API keys with scopes, rate limits, and how many requests may be in flight.

Called by `apps`, which puts its guards before the handlers of `api`. Knows requests only by what they say of their sender:
no transport, no model.
"""
