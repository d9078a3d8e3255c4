# SPDX-License-Identifier: Apache-2.0
"""The model agent: on each node, the models that belong there, as files; and what all nodes tell, summed up per model.

`headrace model-agent` runs `program` on every node. Lives here: which models a node gets (`placing`), where they come from
(`sources`), how they get to their folders and out of them again (`shelf`, `fetching`), what they are (`reading`), and what a
node tells of them (`entries`, `board`). `summary` and `summing` are the operator's side. May not live here: how bytes come
from a store, which is `storage`'s.

**Who writes what.** An agent writes the labels of its node and one ConfigMap named after it, and nothing else: a node that
somebody has broken into cannot change a model. The operator alone sums the ConfigMaps up into the status of models, and puts
what was read of the files into fields of their specs that are empty.

**Why no finalizer.** Of what an agent has brought there is a record beside the files. An agent that was away when a model
was deleted finds the record without its model. So a deletion waits for no node, and none can hold it up.
"""
