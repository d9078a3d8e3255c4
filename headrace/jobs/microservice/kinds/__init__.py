# SPDX-License-Identifier: Apache-2.0
"""Kinds of models: what each takes in an inference or chat request, and what it answers.

    table -> language, vision_language, classifier, detector, embedding, arrays, video -> parameters, generating, media

Each declares its parameters; a request with another one, or with one of the wrong type, is refused before anything is
computed. All compute through the engine's data plane, apart from `video`, whose pipeline is a plug-in.
"""
