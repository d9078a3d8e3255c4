# SPDX-License-Identifier: Apache-2.0
"""Sequences of requests for models with a memory: each sequence's requests go to one instance, one after the other.

Lives here: what a request says of its sequence, the sequences on their way, their seats, control inputs and state.
May not live here: threads, protocols, how a model computes.
"""
