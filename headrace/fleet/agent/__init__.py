# SPDX-License-Identifier: Apache-2.0
"""The model agent: downloads the models of each node, and sums up the reports of all nodes per model.

`headrace model-agent` runs `agent` on every node. `model_sources` reads where a model comes from, `downloads` and
`model_store` put it into its folder, `model_metadata` reads its files, `node_status` writes the node's report.
`model_status` is the operator's side. `headrace.models.storage` transfers the bytes.

**Permissions.** An agent writes the labels of its node and one ConfigMap named after it, and nothing else: a compromised
node cannot change a model. Only the operator writes the status of models, and fills empty fields of their specs with what
was read from the files.

**Why no finalizer.** The agent keeps a record next to the files it downloaded. An agent that was down when a model was
deleted finds a record without a model. So a deletion waits for no node.
"""
