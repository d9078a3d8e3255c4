# SPDX-License-Identifier: Apache-2.0
"""Memory that a client on the same machine shares with the server, so that tensors do not travel through a socket.

`regions` is the table of what clients registered; `system` and `cuda` are the two kinds of memory. Used by the codecs of
`v2` and `v1`. Knows no protocol.
"""
