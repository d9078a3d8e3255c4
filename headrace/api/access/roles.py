# SPDX-License-Identifier: Apache-2.0
"""What each role may do: one table of operations, and no for everything that is not in it.

Asked by `api/jobs` with the name of an operation before it does anything, and by `headrace users` for the roles there are.
Roles are per organisation. Must not know how somebody proved who they are.
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
"""A role in every organisation, those to come included. No organisation can have this name."""

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
"""Who may do what. An operation that is not here is nobody's."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who is asking."""

    user_id: str
    user_name: str
    email: str
    roles: Mapping[str, Role]
    """By organisation: the one a token is for, or all of a user's who sent a key."""
    token_id: str = ""
    """The `jti` of the token; "" for who sent a key."""
    expires: float | None = None
    """When the token or the key does, in seconds since 1970."""

    def role_in(self, organisation: str) -> Role | None:
        """Their role there."""
        return role_in(self.roles, organisation)


def role_in(roles: Mapping[str, Role], organisation: str) -> Role | None:
    """The role that was given for an organisation, else the one for all."""
    role = roles.get(organisation)
    return roles.get(ANY_ORGANISATION) if role is None and organisation != ANY_ORGANISATION else role


def may(role: str, operation: str) -> bool:
    """Whether a role allows an operation."""
    return role in OPERATIONS.get(operation, ())


def check(principal: Principal, organisation: str, operation: str) -> None:
    """Refuse what the principal may not do there. Where they have no role, there is nothing for them to find."""
    role = principal.role_in(organisation)
    if role is None:
        raise NotFound(no_role(organisation))
    if role in OPERATIONS.get(operation, ()):
        return
    needed = next((role for role in ROLES if may(role, operation)), None)
    hint = "" if needed is None else f": ask an admin for the role {needed}"
    raise PermissionDenied(f"the role {role} does not allow {operation[:64]!a}{hint}")


def no_role(organisation: str) -> str:
    """What is said to who has no business there; the same whether or not the organisation exists."""
    return f"no role in organisation {organisation[:64]!a}: log in with that ngc_org_name, or ask an admin for a role in it"


def check_organisation(text: str) -> str:
    """Return `text` if it may name an organisation."""
    if not _ORGANISATION.fullmatch(text):
        raise InvalidArgument(
            f"organisation name {text[:64]!a} is not allowed: use 1 to 255 letters, digits, '_' or '-'"
        )
    return text


def check_role(text: str) -> Role:
    """Return `text` if it is a role that a user can have."""
    for role in ROLES:
        if role == text:
            return role
    raise InvalidArgument(f"there is no role {text[:64]!a}: choose {', '.join(ROLES)}")
