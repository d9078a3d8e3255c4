# SPDX-License-Identifier: Apache-2.0
"""Names that OME's agent has given to what it writes; dashboards and scripts that people have go on working."""

from __future__ import annotations

from headrace.fleet.cluster.resources import Resource, Served
from headrace.fleet.names import GROUP, MODEL_LABEL_DOMAIN, VERSION, model_label, model_status_key
from headrace.fleet.words import Document, annotations_of, labels_of, name_of, part, text

READY, UPDATING, FAILED = "Ready", "Updating", "Failed"
"""States of a model on a node: values of the node's label, and `status` of its entry."""

STATUS_LABEL = "models.ome/basemodel-status"
"""Of the ConfigMaps that tell the state of a node."""
RESERVE = "models.ome/reserve-model-artifact"
"""On a model, as a label or an annotation: its files stay when it goes."""
SKIP_READING = "ome.oracle.com/skip-config-parsing"
"""On a model, as an annotation: what its files say is not looked at."""

NODES = Served(Resource("", ("v1",), "Node", "nodes", False), "v1")
CONFIG_MAPS = Served(Resource("", ("v1",), "ConfigMap", "configmaps"), "v1")
SECRETS = Served(Resource("", ("v1",), "Secret", "secrets"), "v1")
BASE_MODELS = Served(Resource(GROUP, (VERSION,), "BaseModel", "basemodels"), VERSION)
CLUSTER_BASE_MODELS = Served(Resource(GROUP, (VERSION,), "ClusterBaseModel", "clusterbasemodels", False), VERSION)

ModelKey = tuple[str, str]
"""Namespace, "" for a ClusterBaseModel, and name."""


def key_of(model: Document) -> ModelKey:
    """The key of a model."""
    return text(model, "metadata", "namespace"), name_of(model)


def label_of(key: ModelKey) -> str:
    """The label of nodes for a model."""
    return model_label(key[1], key[0])


def entry_key(key: ModelKey) -> str:
    """Where a node's ConfigMap tells of a model."""
    return model_status_key(key[1], key[0])


def is_model_label(label: str) -> bool:
    """Whether a label of a node tells of a model."""
    domain, _, name = label.partition("/")
    return domain == MODEL_LABEL_DOMAIN and (name.startswith("clusterbasemodel.") or ".basemodel." in name)


def is_reserved(model: Document) -> bool:
    """Whether the files of a model stay when it goes."""
    return "true" in (labels_of(model).get(RESERVE), annotations_of(model).get(RESERVE))


def is_read(model: Document) -> bool:
    """Whether the files of a model are asked what it is."""
    return annotations_of(model).get(SKIP_READING) != "true"


def shown(key: ModelKey) -> str:
    """A model, for people."""
    return "/".join(each for each in key if each)


def what_matters(model: Document | None) -> object:
    """What of a model is news for a node. Its status, and what was read of its files, are not."""
    metadata = part(model, "metadata")
    names = ("uid", "labels", "annotations", "deletionTimestamp")
    return part(model, "spec").get("storage"), [metadata.get(name) for name in names]
