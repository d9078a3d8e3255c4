# SPDX-License-Identifier: Apache-2.0
"""The ConfigMap `inferenceservice-config`, as OME has it, to settings of the fleet. Pure; read again every minute."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

from headrace.fleet.words import Document, FleetSettings, items, part, text

log = logging.getLogger("headrace.operator")

CONFIG_MAP = "inferenceservice-config"

_TEXTS = {
    "ingressDomain": "ingress_domain",
    "ingressClassName": "ingress_class",
    "domainTemplate": "domain_template",
    "pathTemplate": "path_template",
    "urlScheme": "url_scheme",
    "omeIngressGateway": "ingress_gateway",
}
_SWITCHES = {
    "disableIngressCreation": "disable_ingress_creation",
    "enableGatewayAPI": "enable_gateway_api",
    "disableIstioVirtualHost": "disable_istio_virtualhost",
}


def configured(settings: FleetSettings, config_map: Document | None) -> FleetSettings:
    """The settings with what the ConfigMap says. What is no JSON, or of the wrong type, is logged and left as it was."""
    ingress, deploy, keda = (_entry(config_map, name) for name in ("ingress", "deploy", "kedaConfig"))
    found: dict[str, Any] = {ours: text(ingress, theirs) for theirs, ours in _TEXTS.items() if text(ingress, theirs)}
    found |= {ours: ingress[theirs] for theirs, ours in _SWITCHES.items() if isinstance(ingress.get(theirs), bool)}
    domains = items(ingress, "additionalIngressDomains")
    if domains:
        found["additional_domains"] = tuple(each for each in domains if isinstance(each, str))
    mode = text(deploy, "defaultDeploymentMode")
    if mode in ("RawDeployment", "Serverless"):
        found["default_mode"] = mode
    if text(keda, "promServerAddress"):
        found["prometheus_address"] = text(keda, "promServerAddress")
    return replace(settings, **found)


def _entry(config_map: Document | None, name: str) -> Document:
    said = text(config_map, "data", name)
    try:
        found = json.loads(said) if said else {}
    except ValueError:
        log.warning("%s: the value of %s is no JSON and does not count", CONFIG_MAP, name)
        found = {}
    return part({name: found}, name)
