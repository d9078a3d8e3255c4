# SPDX-License-Identifier: Apache-2.0
"""What runs in a model's process: the channel to the server, the loop around the model, and the module models import.

Lives here: nothing that the server itself imports. Needs numpy and `headrace.core` only, since the interpreter may be one
that the model brings along.
"""
