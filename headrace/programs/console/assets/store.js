// SPDX-License-Identifier: Apache-2.0
// Polls the server's live data every second, keeps two minutes of it, and computes rates from two samples.

import { get } from "./api.js";

const KEPT = 121;
const listeners = new Set();
export const history = [];
const sums = new WeakMap();
let timer = 0;
let refused = false;

export const latest = () => history[history.length - 1] || null;
export function listen(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export async function look() {
  clearTimeout(timer);
  let wait = 1000;
  try {
    const told = await get("console/api/live", { quiet: refused });
    refused = false;
    const last = latest();
    // Counts fell, so the server was restarted: drop the history of the old process.
    if (last && told.process.cpu_seconds < last.process.cpu_seconds) history.length = 0;
    history.push(told);
    if (history.length > KEPT) history.shift();
    for (const listener of listeners) listener(null);
  } catch (error) {
    // Do not ask for a key again and again: there is a button for it.
    refused = error.status === 401 || error.status === 403;
    wait = refused ? 5000 : 2000;
    for (const listener of listeners) listener(error);
  }
  clearTimeout(timer);
  timer = setTimeout(() => (document.hidden ? pause() : look()), wait);
}

function pause() {
  document.addEventListener("visibilitychange", look, { once: true });
}

function addInto(target, source) {
  (source || []).forEach((value, place) => (target[place] = (target[place] || 0) + value));
}

const empty = () => ({
  done: 0, failed: 0, in_flight: 0, waiting: 0, computed: 0, queue_ns: 0, compute_ns: 0, took: [], reasons: [], tokens: [], batches: {},
});

export function total(told, wanted) {
  let known = sums.get(told);
  if (!known) sums.set(told, (known = {}));
  if (known[wanted]) return known[wanted];
  const sum = empty();
  for (const { name, version, numbers } of told.models) {
    if (!numbers || (wanted && wanted !== name && wanted !== `${name}/${version}`)) continue;
    for (const field of ["done", "failed", "in_flight", "waiting", "computed", "queue_ns", "compute_ns"]) sum[field] += numbers[field];
    for (const field of ["took", "reasons", "tokens"]) addInto(sum[field], numbers[field]);
    for (const [rows, count] of Object.entries(numbers.batches || {})) sum.batches[rows] = (sum.batches[rows] || 0) + count;
  }
  return (known[wanted] = sum);
}

const less = (now, before) => now.map((value, place) => Math.max(0, value - (before[place] || 0)));

// A percentile of the durations, from counts by bucket, interpolated within the bucket.
export function percentile(counts, bounds, share) {
  const all = counts.reduce((sum, count) => sum + count, 0);
  if (!all) return null;
  let left = all * share;
  for (let place = 0; place < counts.length; place += 1) {
    if (left <= counts[place] && counts[place]) {
      const low = place ? bounds[place - 1] : 0;
      const high = place < bounds.length ? bounds[place] : low;
      return low + ((high - low) * left) / counts[place];
    }
    left -= counts[place];
  }
  return bounds[bounds.length - 1];
}

export function step(before, now, wanted) {
  const seconds = Math.max(0.001, now.time - before.time);
  const [a, b] = [total(before, wanted), total(now, wanted)];
  const rate = (field) => Math.max(0, b[field] - a[field]) / seconds;
  const took = less(b.took, a.took);
  const computed = b.computed - a.computed;
  const batches = {};
  let executions = 0;
  let rows = 0;
  for (const [size, count] of Object.entries(b.batches)) {
    const more = Math.max(0, count - (a.batches[size] || 0));
    if (more) batches[size] = more;
    executions += more;
    rows += more * Number(size);
  }
  return {
    requests: rate("done"),
    failures: rate("failed"),
    p50: percentile(took, now.bounds_ms, 0.5),
    p95: percentile(took, now.bounds_ms, 0.95),
    p99: percentile(took, now.bounds_ms, 0.99),
    queue: computed > 0 ? (b.queue_ns - a.queue_ns) / computed / 1e6 : null,
    compute: computed > 0 ? (b.compute_ns - a.compute_ns) / computed / 1e6 : null,
    waiting: b.waiting,
    in_flight: b.in_flight,
    batch: executions ? rows / executions : null,
    batches,
    reasons: less(b.reasons, a.reasons),
    prompt: b.tokens.length ? Math.max(0, b.tokens[0] - (a.tokens[0] || 0)) / seconds : null,
    generated: b.tokens.length ? Math.max(0, b.tokens[1] - (a.tokens[1] || 0)) / seconds : null,
    process_cpu: Math.max(0, now.process.cpu_seconds - before.process.cpu_seconds) / seconds,
  };
}

export function steps(wanted) {
  const made = [];
  for (let place = 1; place < history.length; place += 1) made.push(step(history[place - 1], history[place], wanted));
  return made;
}
