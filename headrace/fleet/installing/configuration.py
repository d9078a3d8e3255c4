# SPDX-License-Identifier: Apache-2.0
"""The ConfigMap `inferenceservice-config`, with all that can be said in it, and nothing said yet.

What is not in the manifests is not undone when they are applied again: so the defaults are told under a name that nobody
reads, and what somebody adds beside it stays.
"""

from __future__ import annotations

import json

from headrace.fleet.cluster.configuration import CONFIG_MAP
from headrace.fleet.installing.settings import OPERATOR, ManifestSettings, metadata
from headrace.fleet.words import Document, FleetSettings

EXAMPLE = "_example"


def config_map(settings: ManifestSettings) -> Document:
    """The ConfigMap."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(settings, OPERATOR, CONFIG_MAP),
        "data": {EXAMPLE: example()},
    }


def example() -> str:
    """Every key with its default. Kept equal to what `cluster.configuration` reads by a test."""
    ours = FleetSettings()
    rows = [
        ("ingressDomain", ours.ingress_domain, "what the hosts of services end with"),
        ("domainTemplate", ours.domain_template, "a service's host"),
        ("pathTemplate", ours.path_template, "put before its paths, for many services on one host"),
        ("urlScheme", ours.url_scheme, "http or https: what status.url begins with"),
        ("additionalIngressDomains", list(ours.additional_domains), "more of them, for the same services"),
        (
            "disableIngressCreation",
            ours.disable_ingress_creation,
            "true: a Service of the service's name is the way in",
        ),
        ("ingressClassName", ours.ingress_class, "false above: the class of the Ingresses"),
        ("enableGatewayAPI", ours.enable_gateway_api, "HTTPRoutes in place of Ingresses"),
        ("omeIngressGateway", ours.ingress_gateway, "their Gateway, namespace/name"),
        ("disableIstioVirtualHost", ours.disable_istio_virtualhost, "no VirtualService for what Knative runs"),
    ]
    lines = [
        "# Nothing here counts: it shows what may be written beside it, and what holds meanwhile.",
        "# Read again every minute. Values are JSON: copy a key with its value, without these comments.",
        "ingress: |",
        "  {",
    ]
    width = max(len(f"{json.dumps(name)}: {json.dumps(value)},") for name, value, _ in rows)
    for number, (name, value, says) in enumerate(rows):
        said = f"{json.dumps(name)}: {json.dumps(value)}{',' if number + 1 < len(rows) else ''}"
        lines.append(f"    {said:{width}}  # {says}")
    lines += [
        "  }",
        "# RawDeployment or Serverless: of services that say neither.",
        f"deploy: '{json.dumps({'defaultDeploymentMode': ours.default_mode})}'",
        "# Where KEDA asks, unless a service says otherwise.",
        f"kedaConfig: '{json.dumps({'promServerAddress': ours.prometheus_address})}'",
    ]
    return "\n".join(lines) + "\n"
