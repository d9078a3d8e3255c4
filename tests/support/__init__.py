# SPDX-License-Identifier: Apache-2.0
"""Tools shared by all tests: servers, programs, waiting, ports, tiny models. No test lives here."""
