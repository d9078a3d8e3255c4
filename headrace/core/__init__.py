# SPDX-License-Identifier: Apache-2.0
"""Words everyone shares: data types, tensors, requests and responses, errors, names, limits, the clock.

Lives here: small values and pure functions that two or more rooms need, on numpy and the standard library.
May not live here: sockets, files, threads, logging, anything that knows a protocol, a model format or a platform.
Every other room may import this one; it imports none of them.
"""
