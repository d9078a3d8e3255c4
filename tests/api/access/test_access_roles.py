# SPDX-License-Identifier: Apache-2.0
"""Roles: what each allows, and that everything else is refused."""

from __future__ import annotations

import pytest

from headrace.api.access.roles import (
    OPERATIONS,
    ROLES,
    Principal,
    Role,
    check_organisation,
    check_permission,
    check_role,
    is_allowed,
)
from headrace.core.errors import InvalidArgument, NotFound, PermissionDenied


def who(role: Role, organisation: str = "acme") -> Principal:
    return Principal("id", "alice", "", {organisation: role})


def test_a_viewer_changes_nothing_and_computes_nothing() -> None:
    allowed = {operation for operation in OPERATIONS if is_allowed("viewer", operation)}
    assert allowed == {
        "workspaces.read",
        "experiments.read",
        "jobs.read",
        "services.read",
        "session.read",
        "tokens.revoke",
    }


def test_an_operator_manages_models_but_not_users() -> None:
    refused = {operation for operation in OPERATIONS if not is_allowed("operator", operation)}
    assert refused == {"users.read", "users.write", "audit.read", "services.report", "workspaces.backup"}


def test_each_role_may_what_the_one_before_may() -> None:
    for operation in OPERATIONS:
        allowed = [is_allowed(role, operation) for role in ROLES]
        assert allowed == sorted(allowed), operation
        assert allowed[-1], operation


@pytest.mark.parametrize("operation", ["", "jobs", "jobs.", "jobs.READ", "jobs.read ", "*", "jobs.read\n", "__class__"])
def test_operations_outside_the_table_are_allowed_to_no_role(operation: str) -> None:
    for role in ROLES:
        assert not is_allowed(role, operation)
        with pytest.raises(PermissionDenied):
            check_permission(who(role), "acme", operation)


@pytest.mark.parametrize("role", ["", "root", "Admin", "admin ", "*"])
def test_a_role_that_is_none_may_nothing(role: str) -> None:
    assert not any(is_allowed(role, operation) for operation in OPERATIONS)
    with pytest.raises(InvalidArgument, match="viewer, operator, admin"):
        check_role(role)


def test_who_has_no_role_there_finds_nothing_whether_or_not_it_exists() -> None:
    for other in ("umbrella", "ACME", "acme ", "", "*", "acme/../umbrella"):
        with pytest.raises(NotFound) as caught:
            check_permission(who("admin"), other, "jobs.read")
        assert repr(other) in caught.value.message


def test_a_role_everywhere_and_a_lesser_one_somewhere() -> None:
    principal = Principal("id", "alice", "", {"*": "admin", "acme": "viewer"})
    check_permission(principal, "umbrella", "users.write")
    check_permission(principal, "acme", "jobs.read")
    with pytest.raises(
        PermissionDenied, match="the role viewer does not allow 'jobs.write': ask an admin for the role operator"
    ):
        check_permission(principal, "acme", "jobs.write")
    with pytest.raises(InvalidArgument):
        check_organisation("*")


def test_names_of_organisations() -> None:
    for good in ("a", "NV-IDIA_0", "x" * 255):
        assert check_organisation(good) == good
    for bad in ("", "x" * 256, "a b", "a.b", "a/b", "a\n", "é", "a\x00", "*"):
        with pytest.raises(InvalidArgument):
            check_organisation(bad)
