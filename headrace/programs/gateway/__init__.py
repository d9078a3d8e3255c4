# SPDX-License-Identifier: Apache-2.0
"""The gateway: the job API as a program, with its database, its users and the services it starts.

Called by `headrace gateway`; `opening` also by `headrace users` and `headrace jobs`, which work beside it.
"""
