# SPDX-License-Identifier: Apache-2.0
"""The admin API over HTTP: what operators change while a server runs. Today, how versions share a model's traffic."""
