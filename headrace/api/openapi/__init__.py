# SPDX-License-Identifier: Apache-2.0
"""What the HTTP routes take and answer, as an OpenAPI document for programs and as a page for people.

`service` is the door; it asks the server's `Routes` which routes exist, the tables for what is known of them, and `models`
for what the loaded models take. A room may describe its own routes with a table of plain data: see `describing`.
"""
