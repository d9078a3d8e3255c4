# SPDX-License-Identifier: Apache-2.0
"""KV transfer between prefill and decode servers (disaggregated prefill): see `core.kv_transfer`.

    connector     saves and loads KV pages for the instances of one server
    page_store    saved pages in shared memory, limited in bytes and time
    sender        serves saved pages over TCP to decode servers on other machines
    receiver      fetches the pages of a transfer token, from shared memory or over TCP
    page_layout   KV pages as bytes, and the fingerprint that two servers must share

Which requests are split is the router's business; when pages are filled is the scheduler's.
"""
