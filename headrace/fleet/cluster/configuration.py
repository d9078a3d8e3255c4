# SPDX-License-Identifier: Apache-2.0
"""Read OME's ConfigMap `inferenceservice-config` into the settings of the fleet. The operator reads it every minute."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

from headrace.fleet.documents import FleetSettings
from headrace.fleet.planning.pod_defaults import POD_SECURITY
from headrace.platforms.kubernetes_client.objects import Document, get_list, get_mapping, get_str

log = logging.getLogger("headrace.operator")

CONFIG_MAP = "inferenceservice-config"
MOST_PRE_STOP_SECONDS = 3600

_STRINGS = {
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


def settings_from(settings: FleetSettings, config_map: Document | None) -> FleetSettings:
    """Return the settings with the values of the ConfigMap. Invalid JSON is logged; values of a wrong type are ignored."""
    ingress, deploy, keda = (_entry(config_map, name) for name in ("ingress", "deploy", "kedaConfig"))
    values: dict[str, Any] = {
        ours: get_str(ingress, theirs) for theirs, ours in _STRINGS.items() if get_str(ingress, theirs)
    }
    values |= {ours: ingress[theirs] for theirs, ours in _SWITCHES.items() if isinstance(ingress.get(theirs), bool)}
    domains = get_list(ingress, "additionalIngressDomains")
    if domains:
        values["additional_domains"] = tuple(domain for domain in domains if isinstance(domain, str))
    mode = get_str(deploy, "defaultDeploymentMode")
    if mode in ("RawDeployment", "Serverless"):
        values["default_mode"] = mode
    wait = deploy.get("preStopSeconds")
    if isinstance(wait, int) and not isinstance(wait, bool) and 0 <= wait <= MOST_PRE_STOP_SECONDS:
        values["pre_stop_seconds"] = wait
    if get_str(deploy, "podSecurity") in POD_SECURITY:
        values["pod_security"] = get_str(deploy, "podSecurity")
    if get_str(keda, "promServerAddress"):
        values["prometheus_address"] = get_str(keda, "promServerAddress")
    return replace(settings, **values)


def _entry(config_map: Document | None, name: str) -> Document:
    value = get_str(config_map, "data", name)
    try:
        decoded = json.loads(value) if value else {}
    except ValueError:
        log.warning("%s: ignoring %s: its value is not JSON", CONFIG_MAP, name)
        decoded = {}
    return get_mapping({name: decoded}, name)
