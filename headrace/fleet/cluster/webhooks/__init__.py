# SPDX-License-Identifier: Apache-2.0
"""Admission webhooks: what the API server asks of us before it keeps a document of our kinds.

`Webhooks` of `running` is started by `program`, in every replica of the operator, the leading one or not. Lives here: what
is answered (`reviews`, `defaults`, `patching`: pure), the certificates that the answers are served with (`certificates`
makes them, `keeping` has them in a Secret), the server (`serving`) and the configurations that send the API server here
(`registering`). May not live here: what is wrong with a document, which is `admission`'s.

**Why failures are ignored.** The controller checks every document again, and tells in a condition what it cannot do. An
operator that is down costs a late answer, then, and must not keep anybody from editing; deletions are never asked about.
`Fail` can be chosen where a late answer is worse than none.

**What is refused, and what only warned of.** Refused is what is wrong with a document in itself, or beside one that is
there: a disabled runtime, a rival. That a document names another one that is *not* there is a warning: files come in any
order, and a model that was applied a moment before its service may not have been seen yet. The controller waits for it, and
says so. An edit is refused for what it makes wrong, not for what was wrong before it: who takes a label away need not repair
the rest.

**Before the cluster has been seen,** right after the start, only what needs no other document is checked, and no default is
written; the controller fills in the same ones whenever it plans.
"""
