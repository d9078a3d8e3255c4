# SPDX-License-Identifier: Apache-2.0
"""Waking from zero: requests wait while what answers them is started, and what nobody asks is put to sleep again.

Made by `proxy` when the settings have `activation`. The proxies ask only when they have nobody to send a request to, so that
a router whose backends are awake does no more per request than any other.

    settings      what sleeps, when, and how much may wait
    scaler        `Scaler`: how many of a thing there are, and how many there should be; who starts them is behind it
    kubernetes    the one that speaks with an API server
    local         the one that speaks with `headrace up`
    targets       how it stands with what sleeps, followed through the scaler
    holding       requests that wait, and their bounds
    held          what a waiting request is, of either proxy
    parts         a cold start in parts, for metrics, the status, traces and the daemon
    activator     puts these together: asleep, waking, awake, falling asleep; above one it asks `fleet.autoscaling`

One router holds the requests of a service: a second one could not know that the first is busy, and would put its pods to
sleep. May not live here: the choice of a backend, HTTP, and how a replica is made.
"""
