# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode apart: one backend computes a prompt, another goes on from there. See `core.handing`.

    settings   what can be told
    pairs      who is asked for a prompt, who answers, and what came of it
    asking     one prompt on its way to a prefill
    flows      a request that asks a prefill first

Backends say by their `role` which part they have. Made by `proxy` where any can have one; a router without roles knows
nothing of this. May not live here: pages and what tickets mean (`backends.llm.handing`); to a router they are text.
"""
