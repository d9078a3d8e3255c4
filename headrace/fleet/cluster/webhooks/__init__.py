# SPDX-License-Identifier: Apache-2.0
"""Admission webhooks: default and validate custom resources before the API server stores them.

`server` runs in every replica of the operator, the leader or not. `reviews` answers a request, `certificates` issues the TLS
certificate, `registration` writes the webhook configurations. `admission` has the rules.

**Why the failure policy is Ignore.** The controller validates every document again, and reports problems in a condition. An
operator that is down delays that answer, but must not keep anyone from editing. Deletions are never sent to the webhooks.
`Fail` can be chosen where a late answer is worse than none.

**What is refused, and what is a warning.** Refused: what is wrong with a document itself, or with its relation to an
existing one, such as a disabled runtime. A reference to a document that does *not* exist is a warning: files come in any
order, and a model that was just applied may not be in the cache yet. The controller waits for it, and says so. An edit is
refused only for problems that it adds.

**Before the cache is synced,** right after the start, only rules that need no other document are checked, and no defaults
are written; the controller fills in the same defaults whenever it plans.
"""
