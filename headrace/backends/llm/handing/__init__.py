# SPDX-License-Identifier: Apache-2.0
"""Pages of keys and values from one server to another: kept by a prefill, taken by a decoder. See `core.handing`.

    layout      pages of a cache to bytes and back
    identity    what two servers must have in common for that: the weights, and how a page is laid out
    keeping     the bytes in shared memory, bounded in number and time
    giving      ... and over TCP, for decoders of other machines
    taking      from a ticket to bytes, by whichever way is open
    hands       all of it for one process: what the instances see
    metrics     what is counted

May not live here: which requests are handed over (`router`), and when pages are filled (`scheduling`).
"""
