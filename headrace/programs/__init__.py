# SPDX-License-Identifier: Apache-2.0
"""Every program of Headrace: settings become objects, the objects run, and on a signal they drain.

`serve`, `router`, `gateway`, `microservice`, `batch`, `operator`, `model_agent` and `fleet_daemon` are the commands of these
names. `configuration` reads the settings of `serve`; `console` has the web pages; `doctor` and `loadtest` are what
`headrace doctor`, `bench` and `tune` run. Only `cli` imports this package.
"""
