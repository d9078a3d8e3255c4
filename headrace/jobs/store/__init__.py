# SPDX-License-Identifier: Apache-2.0
"""What is kept, in SQL: SQLite or PostgreSQL, the same statements for both. Used by `jobs.service` through `store.Store`."""
