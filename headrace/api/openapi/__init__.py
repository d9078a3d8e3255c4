# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document of a server's HTTP routes and its loaded models, and a page that shows it.

`http` serves both. The routes come from the server's `Routes`, their descriptions from tables of OpenAPI operations
(`operations`), and the models from `models`. Another package can describe its own routes with a table of plain data.
"""
