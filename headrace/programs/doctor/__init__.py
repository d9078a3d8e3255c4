# SPDX-License-Identifier: Apache-2.0
"""The checks of `headrace doctor`: what is missing or wrong on this machine, and the command that fixes it.

Every module checks one part of the machine and returns `Finding`s; `finding` runs them side by side. Nothing here
changes the machine.
"""
