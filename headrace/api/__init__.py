# SPDX-License-Identifier: Apache-2.0
"""One sub-room per surface. Each only translates between its protocol and the data plane.

May not live here: batching, model state, sockets. Sub-rooms do not import each other.
"""
