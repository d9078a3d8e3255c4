# SPDX-License-Identifier: Apache-2.0
"""The model repository: folders of models, which of their versions serve, and how that changes while requests run.

Lives here: reading the folders (`scan`), what is loaded and how it got there (`states`, `directory`), the life of each
model (`lifecycle`) and of all of them (`control`), and the check of a repository without serving (`check`). May not live
here: queues, instances and computing, which come in as an `OpenVersion`, and any protocol.
"""
