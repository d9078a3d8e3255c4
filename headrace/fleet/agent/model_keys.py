# SPDX-License-Identifier: Apache-2.0
"""Keys, labels and annotations of models on nodes, as OME names them, so that existing dashboards and scripts work."""

from __future__ import annotations

from headrace.fleet.names import GROUP, MODEL_LABEL_DOMAIN, VERSION, model_label, model_status_key
from headrace.platforms.kubernetes_client.objects import (
    Document,
    Resource,
    ServedResource,
    annotations_of,
    get_mapping,
    labels_of,
)

READY, UPDATING, FAILED = "Ready", "Updating", "Failed"
"""States of a model on a node: values of the node's label, and `status` of its entry."""

STATUS_LABEL = "models.ome/basemodel-status"
"""Label of the ConfigMaps that report the state of a node."""
RESERVE = "models.ome/reserve-model-artifact"
"""Label or annotation of a model whose files are kept when it is deleted."""
SKIP_PARSING = "ome.oracle.com/skip-config-parsing"
"""Annotation of a model whose files are not parsed for its metadata."""

NODES = ServedResource(Resource("", ("v1",), "Node", "nodes", False), "v1")
CONFIG_MAPS = ServedResource(Resource("", ("v1",), "ConfigMap", "configmaps"), "v1")
SECRETS = ServedResource(Resource("", ("v1",), "Secret", "secrets"), "v1")
BASE_MODELS = ServedResource(Resource(GROUP, (VERSION,), "BaseModel", "basemodels"), VERSION)
CLUSTER_BASE_MODELS = ServedResource(
    Resource(GROUP, (VERSION,), "ClusterBaseModel", "clusterbasemodels", False), VERSION
)

ModelKey = tuple[str, str]
"""Namespace, "" for a ClusterBaseModel, and name."""


def label_of(key: ModelKey) -> str:
    """Return the node label of a model."""
    return model_label(key[1], key[0])


def entry_name(key: ModelKey) -> str:
    """Return the key of a model in a node's ConfigMap."""
    return model_status_key(key[1], key[0])


def is_model_label(label: str) -> bool:
    """Whether a node label is about a model."""
    domain, _, name = label.partition("/")
    return domain == MODEL_LABEL_DOMAIN and (name.startswith("clusterbasemodel.") or ".basemodel." in name)


def is_reserved(model: Document) -> bool:
    """Whether the files of a model are kept when it is deleted."""
    return "true" in (labels_of(model).get(RESERVE), annotations_of(model).get(RESERVE))


def reads_files(model: Document) -> bool:
    """Whether the files of a model are parsed for its metadata."""
    return annotations_of(model).get(SKIP_PARSING) != "true"


def display_name(key: ModelKey) -> str:
    """Return `namespace/name`, or the name of a ClusterBaseModel, for messages."""
    return "/".join(part for part in key if part)


def relevant_fields(model: Document | None) -> object:
    """Return the fields of a model that an agent reacts to: not its status, nor the metadata read from its files."""
    metadata = get_mapping(model, "metadata")
    names = ("uid", "labels", "annotations", "deletionTimestamp")
    return get_mapping(model, "spec").get("storage"), [metadata.get(name) for name in names]
