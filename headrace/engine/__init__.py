# SPDX-License-Identifier: Apache-2.0
"""Models and requests: who computes a request, with whom, and when. Knows no protocol.

Lives here: the data plane that every protocol calls, and batching. May not live here: HTTP, gRPC, JSON, sockets.
At this stage the engine serves built-in models only; the model repository is to come.
"""
