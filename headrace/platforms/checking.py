# SPDX-License-Identifier: Apache-2.0
"""What a driver refuses before it touches its platform: ids and variables that could not arrive as they are.

Called first by every driver. Values may be any text but a zero byte; names are those that every shell and platform takes.
"""

from __future__ import annotations

import re

from headrace.core.errors import InvalidArgument
from headrace.platforms.contract import LaunchSpec
from headrace.platforms.folders import is_id

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_job_id(job_id: str) -> str:
    """The id itself, if it is one: it names things on platforms and in folders."""
    if not is_id(job_id):
        raise InvalidArgument("a service's job id is a UUID, written in lower case")
    return job_id


def check_spec(spec: LaunchSpec) -> None:
    """Raise InvalidArgument if something of a spec can arrive nowhere. Names no value: it may be secret."""
    check_job_id(spec.job_id)
    for name, value in (*spec.environment.items(), *spec.secret_environment.items()):
        if not _NAME.fullmatch(name):
            raise InvalidArgument(
                f"{name!a} cannot be the name of a variable: letters of ASCII, digits and _, and no digit first"
            )
        if "\0" in value:
            raise InvalidArgument(f"the variable {name} has a zero byte in its value; no program can be given that")
    both = spec.environment.keys() & spec.secret_environment.keys()
    if both:
        raise InvalidArgument(f"{', '.join(sorted(both))}: given as a plain and as a secret variable; give it once")
    if spec.container is not None:
        told = [spec.container.image, spec.container.command]
        told += [text for mount in spec.container.mounts for text in (mount.host, mount.inside)]
        if any("\0" in text for text in told):
            raise InvalidArgument("an image, a command or a mount cannot have a zero byte")
    if any("\0" in text for pair in spec.labels.items() for text in pair):
        raise InvalidArgument("a label cannot have a zero byte")
