# SPDX-License-Identifier: Apache-2.0
"""Names and numbers of the webhooks. The manifests have the same names."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from urllib.parse import urlsplit

from headrace.core.errors import InvalidArgument
from headrace.fleet.cluster.resources import BENCHMARKS, FACTS, SERVICES, Resource, Served
from headrace.fleet.names import GROUP, VERSION
from headrace.net.sockets import Address

SERVICE = "headrace-operator-webhook"
"""The Service that the API server finds us by."""
SERVICE_PORT = 443
PORT = 9443
SECRET = "headrace-webhook-certificate"  # noqa: S105  its name
CONFIGURATION = "headrace-operator"
"""Both webhook configurations."""
OPT_OUT = "ome.io/webhooks"
"""Label of a namespace, `disabled`: its documents are not sent to us."""
READY_PATH = "/readyz"
POLICIES = ("Ignore", "Fail")

CHECKED = (SERVICES, *FACTS, BENCHMARKS)
"""The kinds that are checked. Services get their defaults written, too."""

SECRETS = Served(Resource("", ("v1",), "Secret", "secrets"), "v1")
NAMESPACES = Served(Resource("", ("v1",), "Namespace", "namespaces", False), "v1")
_REGISTRATION = "admissionregistration.k8s.io"
MUTATING = Served(
    Resource(_REGISTRATION, ("v1",), "MutatingWebhookConfiguration", "mutatingwebhookconfigurations", False), "v1"
)
VALIDATING = Served(
    Resource(_REGISTRATION, ("v1",), "ValidatingWebhookConfiguration", "validatingwebhookconfigurations", False), "v1"
)


@dataclass(frozen=True)
class Lifetimes:
    """How long certificates last, and how long before their end they are replaced."""

    authority: timedelta = timedelta(days=730)
    authority_left: timedelta = timedelta(days=180)
    """More than a certificate lasts, so that none outlives the authority that signed it."""
    certificate: timedelta = timedelta(days=90)
    certificate_left: timedelta = timedelta(days=30)


@dataclass(frozen=True)
class WebhookSettings:
    """Where webhooks are served, and how the API server gets there."""

    address: str
    """`host:port` to listen on."""
    namespace: str
    """The operator's own: where its Secret and its Service are."""
    url: str = ""
    """`https://host:port`, for an operator that no Service leads to; "": by the Service."""
    failure_policy: str = "Ignore"
    look_seconds: float = 60.0
    """How often to look whether certificates end soon, and whether the configurations are as they should be."""
    lifetimes: Lifetimes = field(default_factory=Lifetimes)

    @property
    def names(self) -> tuple[str, ...]:
        """What the certificate is for: names and addresses."""
        service = f"{SERVICE}.{self.namespace}.svc"
        return (service, f"{service}.cluster.local", *((urlsplit(self.url).hostname or "",) if self.url else ()))

    def checked(self) -> WebhookSettings:
        """The settings, if they can be used. Raises InvalidArgument."""
        Address.parse(self.address)
        if self.failure_policy not in POLICIES:
            raise InvalidArgument(f"--webhook-failure-policy {self.failure_policy}: write Ignore or Fail")
        if self.url:
            try:
                parts = urlsplit(self.url)
                fits = parts.scheme == "https" and bool(parts.hostname) and (parts.port or 443) > 0
            except ValueError:  # a port that is no number, brackets around no address
                fits = False
            if not fits or parts.query or parts.fragment or parts.username:
                raise InvalidArgument(
                    f"--webhook-url {self.url}: write https://HOST:PORT, as the API server can reach this machine"
                )
        return self


def path_of(kind: str, deed: str) -> str:
    """`/validate-ome-io-v1beta1-inferenceservice`; OME has the same paths."""
    return f"/{deed}-{GROUP.replace('.', '-')}-{VERSION}-{kind.lower()}"
