# SPDX-License-Identifier: Apache-2.0
"""What the server tells about itself: logs, metrics, traces, progress events.

Lives here: the log formats and the fields every line carries, metric primitives and their text, the tracing facade, and
the events of long tasks. Everything is made by a composition root and passed in; importing this room sets nothing up.
May not live here: sockets and routes (the scrape's answer is bytes that `api` sends), the metrics of a particular room
(each room declares its own on the registry it is given), bars and tables (`cli` draws them).
"""
