# SPDX-License-Identifier: Apache-2.0
"""The SQL store: SQLite or PostgreSQL, with the same statements for both. `store.Store` is the entry point."""
