# SPDX-License-Identifier: Apache-2.0
"""What settings and annotations say about the way into a service, and the Ingress, HTTPRoutes and VirtualService of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headrace.fleet.names import (
    CLUSTER_LOCAL,
    INGRESS_ADDITIONAL_DOMAINS,
    INGRESS_DISABLE_CREATION,
    INGRESS_DISABLE_ISTIO,
    INGRESS_DOMAIN,
    INGRESS_DOMAIN_TEMPLATE,
    INGRESS_PATH_TEMPLATE,
    INGRESS_URL_SCHEME,
    VISIBILITY_LABEL,
)
from headrace.fleet.planning.site import Object, Site
from headrace.fleet.words import Problem, labels_of

INGRESS = ("networking.k8s.io/v1", "Ingress")
HTTP_ROUTE = ("gateway.networking.k8s.io/v1", "HTTPRoute")
VIRTUAL_SERVICE = ("networking.istio.io/v1beta1", "VirtualService")
KNATIVE_GATEWAY = "knative-local-gateway.istio-system.svc.cluster.local"
DEFAULT_TIMEOUT = 60
_PLACEHOLDER = re.compile(r"\{\{\s*\.(Name|Namespace|IngressDomain|(?:Labels|Annotations)\.[^\s}]+)\s*\}\}")
_HOST = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*")


@dataclass(frozen=True)
class WayIn:
    """How clients come in."""

    site: Site
    made: bool
    """Whether an Ingress or the like is made; else a Service named after the InferenceService is the way in."""
    private: bool
    """Nobody outside of the cluster is let in."""
    gateway: bool
    scheme: str
    domain: str
    more_domains: tuple[str, ...]
    template: str
    path_template: str
    istio: bool

    def host(self, name: str, domain: str = "") -> str:
        """The host of the service or a component, by the template."""
        return self._filled(self.template, name, domain or self.domain)

    def hosts(self, name: str) -> list[str]:
        """All hosts of the service or a component."""
        return list(dict.fromkeys(self.host(name, each) for each in (self.domain, *self.more_domains)))

    def path(self) -> str:
        """Where the service is on the domain itself; "" for nowhere."""
        return self._filled(self.path_template, self.site.name, self.domain) if self.path_template else ""

    def _filled(self, template: str, name: str, domain: str) -> str:
        known = {"Name": name, "Namespace": self.site.namespace, "IngressDomain": domain}
        labels = {"Labels": labels_of(self.site.service), "Annotations": self.site.annotations}

        def value(found: re.Match[str]) -> str:
            word = found[1]
            kind, _, key = word.partition(".")
            return known[word] if word in known else labels[kind].get(key, "")

        return _PLACEHOLDER.sub(value, template)


def way_in(site: Site) -> WayIn:
    """The way into a service: what its annotations say, else the settings."""
    settings, said = site.facts.settings, site.annotations
    more = said.get(INGRESS_ADDITIONAL_DOMAINS)
    domains = tuple(each.strip() for each in more.split(",") if each.strip()) if more else settings.additional_domains
    private = labels_of(site.service).get(VISIBILITY_LABEL) == CLUSTER_LOCAL
    disabled = _truth(said.get(INGRESS_DISABLE_CREATION), settings.disable_ingress_creation)
    no_istio = _truth(said.get(INGRESS_DISABLE_ISTIO), settings.disable_istio_virtualhost)
    return WayIn(
        site=site,
        made=not disabled and not private,
        private=private,
        gateway=settings.enable_gateway_api,
        scheme=said.get(INGRESS_URL_SCHEME) or settings.url_scheme,
        domain=said.get(INGRESS_DOMAIN) or settings.ingress_domain,
        more_domains=domains,
        template=said.get(INGRESS_DOMAIN_TEMPLATE) or settings.domain_template,
        path_template=said.get(INGRESS_PATH_TEMPLATE) or settings.path_template,
        istio=site.has("istio") and not no_istio,
    )


def way_problems(way: WayIn) -> Iterator[Problem]:
    """What no client could come in by."""
    if not way.made:
        return
    for host in way.hosts(way.site.name):
        if len(host) > 253 or _HOST.fullmatch(host) is None:
            said = f"the host would be {host[:80]!a}, which is no name of a host"
            fix = f"correct the domain and the template ({{{{.Name}}}} and the like) or set {INGRESS_DISABLE_CREATION}"
            yield Problem(f"metadata.annotations[{INGRESS_DOMAIN_TEMPLATE}]", said, fix)
            return
    if way.gateway and not way.site.has("gateway"):
        said = "the settings ask for HTTPRoutes, and this cluster has no Gateway API"
        yield Problem("", said, "install its CRDs, or turn enableGatewayApi off in inferenceservice-config")
    elif way.gateway and not way.site.facts.settings.ingress_gateway:
        said = "no Gateway is set that HTTPRoutes could belong to"
        yield Problem("", said, "set omeIngressGateway: namespace/name in inferenceservice-config")


def ingress(way: WayIn, backends: Mapping[str, tuple[str, int]], labels: Mapping[str, str]) -> Object:
    """The Ingress. `backends`: Service and port by the name whose host leads there, the service's own first."""
    rules = [_rule(host, "/", *backend) for name, backend in backends.items() for host in way.hosts(name)]
    if way.path():
        rules.append(_rule(way.domain, way.path(), *backends[way.site.name]))
    spec = {"ingressClassName": way.site.facts.settings.ingress_class, "rules": rules}
    return way.site.made(INGRESS, way.site.name, labels, spec=spec)


def http_route(
    way: WayIn, name: str, backends: list[tuple[str, int, int]], timeout: int | None, labels: Mapping[str, str]
) -> Object:
    """The HTTPRoute of a name's hosts, by weight to (Service, port, weight)."""
    site = way.site
    namespace, _, gateway = site.facts.settings.ingress_gateway.rpartition("/")
    parent = {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": gateway}
    headers = [
        {"name": "OMe-Isvc-Name", "value": site.name},
        {"name": "OME-Isvc-Namespace", "value": site.namespace},
    ]
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
        "filters": [{"type": "RequestHeaderModifier", "requestHeaderModifier": {"set": headers}}],
        "backendRefs": [
            {"group": "", "kind": "Service", "name": service, "port": port, "weight": weight}
            for service, port, weight in backends
        ],
        "timeouts": {"request": f"{min(timeout or DEFAULT_TIMEOUT, 99999)}s"},
    }
    spec = {
        "parentRefs": [{**parent, "namespace": namespace} if namespace else parent],
        "hostnames": way.hosts(name),
        "rules": [rule],
    }
    return site.made(HTTP_ROUTE, name, labels, spec=spec)


def virtual_service(way: WayIn, service: str, labels: Mapping[str, str]) -> Object:
    """Istio's way to a Knative Service, which knows itself by its own host alone."""
    site = way.site
    gateways = ["knative-serving/knative-local-gateway"]
    gateways += [site.facts.settings.ingress_gateway or "knative-serving/knative-ingress-gateway"]
    route = {
        "destination": {"host": KNATIVE_GATEWAY, "port": {"number": 80}},
        "headers": {"request": {"set": {"Host": site.host(service)}}},
    }
    hosts = dict.fromkeys([*way.hosts(site.name), site.host(site.name)])
    spec = {"hosts": list(hosts), "gateways": gateways, "http": [{"route": [route]}]}
    return site.made(VIRTUAL_SERVICE, site.name, labels, spec=spec)


def _rule(host: str, path: str, service: str, port: int) -> Object:
    backend = {"service": {"name": service, "port": {"number": port}}}
    return {"host": host, "http": {"paths": [{"path": path, "pathType": "Prefix", "backend": backend}]}}


def _truth(said: str | None, default: bool) -> bool:
    return default if said is None else said == "true"
