# SPDX-License-Identifier: Apache-2.0
"""KV offload: KV-cache pages that leave the device are kept in host memory and on disk, and loaded again by prefix.

host_pages     the host level: a bounded LRU of pages in one block of (pinned) host memory
disk_pages     the disk level: one file a page, written and read by threads
page_copier    copies between the KV cache and host memory, on a stream of its own on a GPU
offload        what the page pool, the scheduler and the engine core call
"""
