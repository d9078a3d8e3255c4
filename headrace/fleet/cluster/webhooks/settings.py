# SPDX-License-Identifier: Apache-2.0
"""Settings and resource names of the webhooks, shared with the manifests."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from urllib.parse import urlsplit

from headrace.core.errors import InvalidArgument
from headrace.fleet.cluster.resources import BENCHMARKS, FACTS, SERVICES
from headrace.fleet.names import GROUP, VERSION
from headrace.net.sockets import Address
from headrace.platforms.kubernetes_client.objects import Resource, ServedResource

SERVICE = "headrace-operator-webhook"
"""Name of the Service in front of the webhooks."""
SERVICE_PORT = 443
PORT = 9443
SECRET = "headrace-webhook-certificate"  # noqa: S105  a name
CONFIGURATION = "headrace-operator"
"""Name of both webhook configurations."""
ROLE = "headrace-operator-webhook"
"""Name of the ClusterRole to register them. It owns them: they are deleted with the installation."""
OPT_OUT = "ome.io/webhooks"
"""Label of a namespace: with `disabled`, its documents are not sent to the webhooks."""
READY_PATH = "/readyz"
POLICIES = ("Ignore", "Fail")

VALIDATED_KINDS = (SERVICES, *FACTS, BENCHMARKS)
"""The kinds that are validated. Services are mutated, too."""

SECRETS = ServedResource(Resource("", ("v1",), "Secret", "secrets"), "v1")
CLUSTER_ROLES = ServedResource(
    Resource("rbac.authorization.k8s.io", ("v1",), "ClusterRole", "clusterroles", False), "v1"
)
_REGISTRATION = "admissionregistration.k8s.io"
MUTATING = ServedResource(
    Resource(_REGISTRATION, ("v1",), "MutatingWebhookConfiguration", "mutatingwebhookconfigurations", False), "v1"
)
VALIDATING = ServedResource(
    Resource(_REGISTRATION, ("v1",), "ValidatingWebhookConfiguration", "validatingwebhookconfigurations", False), "v1"
)


@dataclass(frozen=True)
class Lifetimes:
    """Validity of certificates, and how long before expiry they are replaced."""

    authority: timedelta = timedelta(days=730)
    authority_left: timedelta = timedelta(days=180)
    """Longer than a certificate is valid, so that none outlives its authority."""
    certificate: timedelta = timedelta(days=90)
    certificate_left: timedelta = timedelta(days=30)


@dataclass(frozen=True)
class WebhookSettings:
    """Where webhooks are served, and how the API server reaches them."""

    address: str
    """`host:port` to listen on."""
    namespace: str
    """The operator's namespace, with its Secret and Service."""
    url: str = ""
    """`https://host:port` of an operator without a Service; "": use the Service."""
    failure_policy: str = "Ignore"
    refresh_seconds: float = 60.0
    """Interval at which certificates and configurations are checked."""
    lifetimes: Lifetimes = field(default_factory=Lifetimes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names and addresses of the certificate."""
        service = f"{SERVICE}.{self.namespace}.svc"
        return (service, f"{service}.cluster.local", *((urlsplit(self.url).hostname or "",) if self.url else ()))

    def checked(self) -> WebhookSettings:
        """Return the settings if they are valid. Raises InvalidArgument."""
        Address.parse(self.address)
        if self.failure_policy not in POLICIES:
            raise InvalidArgument(f"--webhook-failure-policy {self.failure_policy}: write Ignore or Fail")
        if self.url:
            try:
                parts = urlsplit(self.url)
                fits = parts.scheme == "https" and bool(parts.hostname) and (parts.port or 443) > 0
            except ValueError:  # an invalid port or IPv6 address
                fits = False
            if not fits or parts.query or parts.fragment or parts.username:
                raise InvalidArgument(
                    f"--webhook-url {self.url}: write https://HOST:PORT, as the API server can reach this machine"
                )
        return self


def webhook_path(kind: str, operation: str) -> str:
    """Return `/validate-ome-io-v1beta1-inferenceservice`; OME has the same paths."""
    return f"/{operation}-{GROUP.replace('.', '-')}-{VERSION}-{kind.lower()}"
