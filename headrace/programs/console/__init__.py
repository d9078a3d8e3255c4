# SPDX-License-Identifier: Apache-2.0
"""The web consoles, at `/console` of a server, of the gateway and of the fleet of a machine: pages for who looks on.

`pages` serves the files in `assets`, which are written by hand and need no build. Of a server, `http` is the door, made by a
composition root of `apps`, and `live` reads the engine's counts; everything else that page does goes through the server's
own protocols (v2, OpenAI, /admin). The gateway's page asks its job API. So both may do what their reader's key may do, and
nothing here decides about that. `fleet` is the door of a machine's fleet, which has no other that a browser can open: it has
a key of its own.
"""
