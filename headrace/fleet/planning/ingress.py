# SPDX-License-Identifier: Apache-2.0
"""How requests reach a service: its own Service, the front router, and the Ingress, HTTPRoute or VirtualService."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from headrace.fleet.documents import Problem
from headrace.fleet.names import (
    CLUSTER_LOCAL,
    COMPONENT_LABEL,
    INGRESS_ADDITIONAL_DOMAINS,
    INGRESS_DISABLE_CREATION,
    INGRESS_DISABLE_ISTIO,
    INGRESS_DOMAIN,
    INGRESS_DOMAIN_TEMPLATE,
    INGRESS_PATH_TEMPLATE,
    INGRESS_URL_SCHEME,
    MULTI_NODE,
    MULTI_NODE_RAY,
    SERVERLESS,
    SERVICE_LABEL,
    VISIBILITY_LABEL,
    trunc63,
)
from headrace.fleet.planning.component_plan import ComponentPlan
from headrace.fleet.planning.context import Object, PlanContext, available_replicas
from headrace.fleet.planning.front_router import (
    PORT,
    ActivationTarget,
    Backend,
    front_is_ready,
    front_objects,
    front_selector,
    front_workload,
    workloads_of,
)
from headrace.fleet.planning.inference_pool import POOL, POOL_GROUP, has_pool
from headrace.fleet.planning.multi_node import HEAD, NODE_TYPE, WORKER_INDEX
from headrace.fleet.planning.raw_deployment import HTTP_PORT, alias_service, external_service
from headrace.fleet.planning.shared_activator import SharedActivator, activation_of, front_serves, is_scaled_to_zero
from headrace.platforms.kubernetes_client.objects import labels_of


@dataclass(frozen=True)
class Urls:
    """URLs of a service."""

    url: str = ""
    """URL for clients."""
    address: str = ""
    """URL inside the cluster."""
    components: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Routing:
    """The entry component of a service, and how requests reach it."""

    context: PlanContext
    exposure: Exposure
    entry: ComponentPlan
    parts: Mapping[str, ComponentPlan]
    activation_targets: list[ActivationTarget]

    @property
    def port(self) -> int:
        """Port of the Service named after the InferenceService; 80 with an Ingress, so that URLs need none."""
        return HTTP_PORT if self.exposure.has_ingress else self.entry.port

    @property
    def uses_istio(self) -> bool:
        """Whether Istio routes to a Knative Service."""
        return (
            self.exposure.has_ingress
            and self.exposure.istio
            and not self.exposure.gateway
            and self.entry.mode == SERVERLESS
        )

    @property
    def needs_front(self) -> bool:
        """Whether a front router is needed: see `activation_targets`, `measures_latency`, Knative's hosts, two revisions."""
        if self.entry.mode == SERVERLESS:
            return not self.uses_istio
        split = self.entry.rollout.two and not (self.exposure.has_ingress and self.exposure.gateway)
        return bool(self.activation_targets) or split or self.measures_latency

    @property
    def measures_latency(self) -> bool:
        """Whether components are scaled by the latency of streams, which the front router measures."""
        return any(part.component.extension.slo for part in self.parts.values())

    @property
    def activator(self) -> SharedActivator | None:
        """The shared activator, if it takes over while the service is scaled to zero: not with two revisions at once."""
        if not self.activation_targets or self.entry.mode == SERVERLESS:
            return None
        return None if any(part.rollout.two for part in self.parts.values()) else self.context.activator

    @property
    def routes_to_activator(self) -> bool:
        """Whether the activator's pods are endpoints of the service: until the front router runs, and at zero."""
        front = front_workload(self.context)
        known = activation_of(front)
        if self.activator is None or known is None or known["port"] != self.activator.port:
            return False  # the activator has no such port yet
        at_zero = is_scaled_to_zero(self.context, workloads_of(self.activation_targets))
        return at_zero or not front_serves(front)

    @property
    def routes_to_front(self) -> bool:
        """Whether requests go to the front router already: not while it starts and pods are available without it."""
        if not self.needs_front:
            return False
        if self.activator is not None and self.activator.has_taken_over(self.context):
            return True  # a changed selector is no gap: the activator is an endpoint as well
        return front_is_ready(self.context) or self.entry.mode == SERVERLESS or available_replicas(self.entry.live) == 0


def plan_routing(
    context: PlanContext, parts: Mapping[str, ComponentPlan], activation_targets: list[ActivationTarget]
) -> Routing:
    """Plan the routing to the entry of these components."""
    entry = parts["router"] if "router" in parts else parts["engine"]
    return Routing(context, exposure_of(context), entry, parts, activation_targets)


def routing_problems(routes: Routing) -> Iterator[Problem]:
    """Yield problems of the routing."""
    yield from exposure_problems(routes.exposure)


def routing_objects(routes: Routing) -> list[Object]:
    """Return the front router, the Service of the InferenceService, and its ingress."""
    context, exposure, entry = routes.context, routes.exposure, routes.entry
    objects: list[Object] = []
    if routes.needs_front:
        timeout = entry.component.extension.timeout_seconds
        backends = [Backend(*share, entry.revisions.get(share[0], "")) for share in entry.shares]
        if routes.activator is not None and routes.routes_to_activator:
            # Before the front router's Deployment, which may go to zero once this is stored.
            objects.append(routes.activator.endpoint_slice(context))
        keeps_host = entry.mode != SERVERLESS
        objects += front_objects(
            context,
            backends,
            routes.activation_targets,
            timeout,
            keeps_host,
            routes.activator,
            measure_streams=routes.measures_latency,
        )
    if routes.uses_istio:
        labels = context.own_labels("ingress")
        return [*objects, alias_service(context, KNATIVE_GATEWAY), virtual_service(exposure, entry.service, labels)]
    if not exposure.private or routes.needs_front:
        target = PORT if routes.routes_to_front else entry.target
        selector = front_selector(context) if routes.routes_to_front else pods_selector(entry)
        objects.append(external_service(context, selector, routes.port, target))
    if exposure.has_ingress:
        objects += _ingress_objects(routes)
    return objects


def service_urls(routes: Routing) -> Urls:
    """Return the URLs of the service and its components."""
    exposure, context = routes.exposure, routes.context
    own = (
        context.host(trunc63(context.name))
        if not exposure.private or routes.needs_front
        else context.host(routes.entry.service)
    )
    internal = _url("http", own, routes.port if own != context.host(routes.entry.service) else routes.entry.port)
    if not exposure.has_ingress:
        components = {name: _url("http", context.host(part.service), part.port) for name, part in routes.parts.items()}
        return Urls(internal, internal, components)
    components = {name: f"{exposure.scheme}://{exposure.host(part.name)}" for name, part in routes.parts.items()}
    return Urls(f"{exposure.scheme}://{exposure.host(context.name)}", internal, components)


def _ingress_objects(routes: Routing) -> list[Object]:
    context, exposure, entry = routes.context, routes.exposure, routes.entry
    labels = context.own_labels("ingress")
    own = (trunc63(context.name), HTTP_PORT)
    routed = {name: part for name, part in routes.parts.items() if part.mode != SERVERLESS}
    if not exposure.gateway:
        backends = {context.name: own if routes.needs_front else (entry.service, entry.port)}
        for part in routed.values():
            backends[part.name] = own if part is entry and routes.needs_front else (part.service, part.port)
        return [ingress(exposure, backends, labels)]
    timeout = entry.component.extension.timeout_seconds
    weighted = [(*own, 1)] if routes.needs_front else entry.shares
    # The gateway chooses pods of an InferencePool itself, also of two revisions.
    route = http_route(exposure, context.name, weighted, timeout, labels)
    if has_pool(context):
        pool = {"group": POOL_GROUP, "kind": POOL[1], "name": context.name, "port": entry.target, "weight": 1}
        route["spec"]["rules"][0]["backendRefs"] = [pool]
    objects = [route]
    for part in routed.values():
        backends_of_part = weighted if part is entry else [(part.service, part.port, 1)]
        objects.append(
            http_route(
                exposure, part.name, backends_of_part, part.component.extension.timeout_seconds, part.component.labels
            )
        )
    return objects


def pods_selector(entry: ComponentPlan, *, stable: bool = True) -> dict[str, str]:
    """Return the selector of the pods that serve: only leaders, and of two revisions the stable one, or both."""
    if stable and entry.rollout.two:
        return dict(entry.selector)
    labels = entry.component.labels
    selector = {SERVICE_LABEL: labels[SERVICE_LABEL], COMPONENT_LABEL: labels[COMPONENT_LABEL]}
    if entry.mode == MULTI_NODE:
        selector[WORKER_INDEX] = "0"
    elif entry.mode == MULTI_NODE_RAY:
        selector[NODE_TYPE] = HEAD
    return selector


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://{host}" if port == HTTP_PORT else f"{scheme}://{host}:{port}"


INGRESS = ("networking.k8s.io/v1", "Ingress")
HTTP_ROUTE = ("gateway.networking.k8s.io/v1", "HTTPRoute")
VIRTUAL_SERVICE = ("networking.istio.io/v1beta1", "VirtualService")
KNATIVE_GATEWAY = "knative-local-gateway.istio-system.svc.cluster.local"
DEFAULT_TIMEOUT = 60
_PLACEHOLDER = re.compile(r"\{\{\s*\.(Name|Namespace|IngressDomain|(?:Labels|Annotations)\.[^\s}]+)\s*\}\}")
_HOST = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*")


@dataclass(frozen=True)
class Exposure:
    """How a service is exposed to clients."""

    context: PlanContext
    has_ingress: bool
    """Whether an Ingress, HTTPRoute or VirtualService is created; else clients use the Service of the same name."""
    private: bool
    """Not exposed outside the cluster."""
    gateway: bool
    scheme: str
    domain: str
    more_domains: tuple[str, ...]
    template: str
    path_template: str
    istio: bool

    def host(self, name: str, domain: str = "") -> str:
        """Return the host of the service or a component, by the template."""
        return self._filled(self.template, name, domain or self.domain)

    def hosts(self, name: str) -> list[str]:
        """Return all hosts of the service or a component."""
        return list(dict.fromkeys(self.host(name, domain) for domain in (self.domain, *self.more_domains)))

    def path(self) -> str:
        """Return the path of the service on the domain itself; "" for none."""
        return self._filled(self.path_template, self.context.name, self.domain) if self.path_template else ""

    def _filled(self, template: str, name: str, domain: str) -> str:
        known = {"Name": name, "Namespace": self.context.namespace, "IngressDomain": domain}
        labels = {"Labels": labels_of(self.context.service), "Annotations": self.context.annotations}

        def value(match: re.Match[str]) -> str:
            placeholder = match[1]
            kind, _, key = placeholder.partition(".")
            return known[placeholder] if placeholder in known else labels[kind].get(key, "")

        return _PLACEHOLDER.sub(value, template)


def exposure_of(context: PlanContext) -> Exposure:
    """Return how a service is exposed: by its annotations, else by the settings."""
    settings, annotations = context.facts.settings, context.annotations
    more = annotations.get(INGRESS_ADDITIONAL_DOMAINS)
    domains = (
        tuple(domain.strip() for domain in more.split(",") if domain.strip()) if more else settings.additional_domains
    )
    private = labels_of(context.service).get(VISIBILITY_LABEL) == CLUSTER_LOCAL
    disabled = _is_true(annotations.get(INGRESS_DISABLE_CREATION), settings.disable_ingress_creation)
    no_istio = _is_true(annotations.get(INGRESS_DISABLE_ISTIO), settings.disable_istio_virtualhost)
    return Exposure(
        context=context,
        has_ingress=not disabled and not private,
        private=private,
        gateway=settings.enable_gateway_api,
        scheme=annotations.get(INGRESS_URL_SCHEME) or settings.url_scheme,
        domain=annotations.get(INGRESS_DOMAIN) or settings.ingress_domain,
        more_domains=domains,
        template=annotations.get(INGRESS_DOMAIN_TEMPLATE) or settings.domain_template,
        path_template=annotations.get(INGRESS_PATH_TEMPLATE) or settings.path_template,
        istio=context.has("istio") and not no_istio,
    )


def exposure_problems(exposure: Exposure) -> Iterator[Problem]:
    """Yield problems of the exposure."""
    if not exposure.has_ingress:
        return
    for host in exposure.hosts(exposure.context.name):
        if len(host) > 253 or _HOST.fullmatch(host) is None:
            message = f"the host would be {host[:80]!a}, which is not a valid host name"
            fix = f"correct the domain and the template ({{{{.Name}}}} and the like) or set {INGRESS_DISABLE_CREATION}"
            yield Problem(f"metadata.annotations[{INGRESS_DOMAIN_TEMPLATE}]", message, fix)
            return
    if exposure.gateway and not exposure.context.has("gateway"):
        message = "the settings ask for HTTPRoutes, and this cluster has no Gateway API"
        yield Problem("", message, "install its CRDs, or turn enableGatewayApi off in inferenceservice-config")
    elif exposure.gateway and not exposure.context.facts.settings.ingress_gateway:
        message = "no Gateway is set that HTTPRoutes could belong to"
        yield Problem("", message, "set omeIngressGateway: namespace/name in inferenceservice-config")


def ingress(exposure: Exposure, backends: Mapping[str, tuple[str, int]], labels: Mapping[str, str]) -> Object:
    """Return the Ingress. `backends`: Service and port by the name of their hosts, the service's own first."""
    rules = [_rule(host, "/", *backend) for name, backend in backends.items() for host in exposure.hosts(name)]
    if exposure.path():
        rules.append(_rule(exposure.domain, exposure.path(), *backends[exposure.context.name]))
    spec = {"ingressClassName": exposure.context.facts.settings.ingress_class, "rules": rules}
    return exposure.context.new_object(INGRESS, exposure.context.name, labels, spec=spec)


def http_route(
    exposure: Exposure, name: str, backends: list[tuple[str, int, int]], timeout: int | None, labels: Mapping[str, str]
) -> Object:
    """Return the HTTPRoute of a name's hosts to backends (Service, port, weight)."""
    context = exposure.context
    namespace, _, gateway = context.facts.settings.ingress_gateway.rpartition("/")
    parent = {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": gateway}
    headers = [
        {"name": "OMe-Isvc-Name", "value": context.name},
        {"name": "OME-Isvc-Namespace", "value": context.namespace},
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
        "hostnames": exposure.hosts(name),
        "rules": [rule],
    }
    return context.new_object(HTTP_ROUTE, name, labels, spec=spec)


def virtual_service(exposure: Exposure, service: str, labels: Mapping[str, str]) -> Object:
    """Return the VirtualService of a Knative Service, with its own host, the only one Knative knows."""
    context = exposure.context
    gateways = ["knative-serving/knative-local-gateway"]
    gateways += [context.facts.settings.ingress_gateway or "knative-serving/knative-ingress-gateway"]
    route = {
        "destination": {"host": KNATIVE_GATEWAY, "port": {"number": 80}},
        "headers": {"request": {"set": {"Host": context.host(service)}}},
    }
    hosts = dict.fromkeys([*exposure.hosts(context.name), context.host(context.name)])
    spec = {"hosts": list(hosts), "gateways": gateways, "http": [{"route": [route]}]}
    return context.new_object(VIRTUAL_SERVICE, context.name, labels, spec=spec)


def _rule(host: str, path: str, service: str, port: int) -> Object:
    backend = {"service": {"name": service, "port": {"number": port}}}
    return {"host": host, "http": {"paths": [{"path": path, "pathType": "Prefix", "backend": backend}]}}


def _is_true(value: str | None, default: bool) -> bool:
    return default if value is None else value == "true"
