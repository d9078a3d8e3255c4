# SPDX-License-Identifier: Apache-2.0
"""Role-based access control of the job API: which role may do which operation.

The job API checks the name of an operation before it runs; an operation that is not in the table is denied. Roles are
per organisation. How a user is authenticated is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from headrace.core.errors import InvalidArgument, NotFound, PermissionDenied

Role = Literal["viewer", "operator", "admin"]

ROLES: tuple[Role, ...] = ("viewer", "operator", "admin")
ANY_ORGANISATION = "*"
"""A role in every organisation, future ones included. No organisation can have this name."""

_ORGANISATION = re.compile(r"[a-zA-Z0-9_-]{1,255}")

_SEE = frozenset[Role](ROLES)
_RUN = frozenset[Role](("operator", "admin"))
_MANAGE = frozenset[Role](("admin",))

OPERATIONS: Mapping[str, frozenset[Role]] = MappingProxyType(
    {
        "workspaces.read": _SEE,
        "workspaces.write": _RUN,
        "workspaces.backup": _MANAGE,  # and restore: all that the organisation has
        "experiments.read": _SEE,
        "experiments.write": _RUN,
        "jobs.read": _SEE,
        "jobs.write": _RUN,
        "services.read": _SEE,
        "services.start": _RUN,
        "services.infer": _RUN,  # takes a GPU's time, and reads the workspace's bucket
        "services.stop": _RUN,
        "services.report": _MANAGE,
        "session.read": _SEE,  # one's own
        "tokens.revoke": _SEE,  # one's own
        "users.read": _MANAGE,
        "users.write": _MANAGE,
        "audit.read": _MANAGE,
    }
)
"""The roles that may do each operation. Any other operation is denied."""


@dataclass(frozen=True, slots=True)
class Principal:
    """The authenticated user of a request."""

    user_id: str
    user_name: str
    email: str
    roles: Mapping[str, Role]
    """By organisation: the one of the token, or all of the user's for a request with a key."""
    token_id: str = ""
    """The `jti` of the token; "" for a request with a key."""
    expires: float | None = None
    """When the token or the key expires, in seconds since 1970."""

    def role_in(self, organisation: str) -> Role | None:
        """Return the role in an organisation."""
        return role_in(self.roles, organisation)


def role_in(roles: Mapping[str, Role], organisation: str) -> Role | None:
    """Return the role for an organisation, else the one for all organisations."""
    role = roles.get(organisation)
    return roles.get(ANY_ORGANISATION) if role is None and organisation != ANY_ORGANISATION else role


def is_allowed(role: str, operation: str) -> bool:
    """Return whether a role allows an operation."""
    return role in OPERATIONS.get(operation, ())


def check_permission(principal: Principal, organisation: str, operation: str) -> None:
    """Raise if the principal may not do the operation; `NotFound` if they have no role in the organisation."""
    role = principal.role_in(organisation)
    if role is None:
        raise NotFound(no_role_message(organisation))
    if role in OPERATIONS.get(operation, ()):
        return
    needed = next((role for role in ROLES if is_allowed(role, operation)), None)
    hint = "" if needed is None else f": ask an admin for the role {needed}"
    raise PermissionDenied(f"the role {role} does not allow {operation[:64]!a}{hint}")


def no_role_message(organisation: str) -> str:
    """Return the error message for a user without a role; the same whether or not the organisation exists."""
    return f"no role in organisation {organisation[:64]!a}: log in with that ngc_org_name, or ask an admin for a role in it"


def check_organisation(text: str) -> str:
    """Return `text` if it is a valid name of an organisation."""
    if not _ORGANISATION.fullmatch(text):
        raise InvalidArgument(
            f"organisation name {text[:64]!a} is not allowed: use 1 to 255 letters, digits, '_' or '-'"
        )
    return text


def check_role(text: str) -> Role:
    """Return `text` if it is a role."""
    for role in ROLES:
        if role == text:
            return role
    raise InvalidArgument(f"unknown role {text[:64]!a}: choose {', '.join(ROLES)}")
