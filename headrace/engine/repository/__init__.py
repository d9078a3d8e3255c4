# SPDX-License-Identifier: Apache-2.0
"""The model repository: folders of models, which of their versions serve, and how that changes while requests run.

`scan` reads the folders, `states` and `directory` hold what is loaded, `lifecycle` loads and unloads one model, `control`
all of them. `trial` has a child process load a model from elsewhere first, and `check` validates a repository without
serving it. Queues, instances and computing are behind `LoadVersion`.
"""
