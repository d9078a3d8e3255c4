# SPDX-License-Identifier: Apache-2.0
"""Code of a model's process: the channel to the server, the loop around the model, and the module that models import.

The server imports nothing from here. It needs numpy and `headrace.core` only, since the interpreter may be the model's
own.
"""
