# SPDX-License-Identifier: Apache-2.0
"""The web console of a server, at `/console`: a page for who looks on, and the one document that it asks for every second.

`http` is the door, made by a composition root of `apps`; `pages` serves the files in `assets`, which are written by hand and
need no build; `live` reads the engine's counts. Everything else the page does goes through the server's own protocols (v2,
OpenAI, /admin), so it may do what its reader's key may do, and nothing here decides about that.
"""
