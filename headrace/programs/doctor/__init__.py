# SPDX-License-Identifier: Apache-2.0
"""What is missing or wrong on a machine that is to serve models, and what to type to mend it.

Called by `headrace doctor`. Every module looks at one part of the machine and returns `finding.Finding`s; `running` runs
them side by side. Nothing here changes anything.
"""
