# SPDX-License-Identifier: Apache-2.0
"""The web console at `/console` of a server, of the gateway and of a machine's fleet.

The files in `assets` are written by hand and need no build. The pages of a server and of the gateway use their normal
protocols (v2, OpenAI, /admin, the job API), so that they may do what the user's key allows; `fleet` serves the page of
a machine's fleet, with a key of its own.
"""
