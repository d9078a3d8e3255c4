# SPDX-License-Identifier: Apache-2.0
"""The sequence batcher for stateful models: all requests of a sequence go to one instance, one after the other.

Holds sequences, their slots and backlog, control inputs and implicit state. Knows no protocol and no backend.
"""
