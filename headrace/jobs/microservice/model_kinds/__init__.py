# SPDX-License-Identifier: Apache-2.0
"""Model kinds: what each takes in an inference or chat request, and what it returns.

Each kind declares its parameters; a request with an unknown parameter or a wrong type is rejected before anything is
computed. All kinds compute through the engine's data plane, except `video`, whose pipeline is a plug-in.
"""
