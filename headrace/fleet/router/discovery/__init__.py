# SPDX-License-Identifier: Apache-2.0
"""Where backends come from when they are not named: a file, a name of the DNS, pods of a cluster.

Made by `proxy`, which tells `backends` of what is found. A source that cannot be read says so in the log, and what it said
last goes on counting: a name server that is gone must not take along what is up.

    settings      what can be told
    watching      whether a file has changed
    files         a list in a file, JSON or YAML
    names         the addresses of a name
    pods          the ready pods that a selector finds
    discoverer    follows the sources, and tells when the whole has changed

May not live here: health, and what happens to requests (`router.backends`).
"""
