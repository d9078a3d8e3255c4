# SPDX-License-Identifier: Apache-2.0
"""Choices that look at the request: what its prompt begins with, whose session it is, how full everybody is.

Made by `proxy` where the settings ask for any of it; a router that spreads by number alone (`router.policies`) never comes
here. `forwarding` then makes the flows of this room instead of its own.

    settings      what can be told
    request       a request as a choice sees it: its head, its body, and what the body means, worked out once at most
    tree          prompts seen lately, by prefix, and who has which; bounded
    policies      `cache_aware` and `prefix_hash`
    ring          consistent hashing, with bounded loads
    sticky        requests of one session to one backend
    chooser       puts these together, and counts why each choice was made
    limits        at most so many requests for each backend; the others wait in `queueing`
    flows         flows that ask the chooser; `hedging` has those that ask two backends when one is slow

May not live here: health, connections, and where backends come from (`router.discovery`).
"""
