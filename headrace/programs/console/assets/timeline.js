// SPDX-License-Identifier: Apache-2.0
// The timeline of one request as bars, with its batch; and the timeline of the playground's own request.

import { get, post } from "./api.js";
import { h, milliseconds, s } from "./dom.js";

const REQUESTS = "console/api/requests";
const WHY = {
  full: "it could not grow: the maximum size was reached, or the next request did not fit",
  preferred: "it had a preferred size",
  "delay expired": "its oldest request had waited max_queue_delay_microseconds",
  "shape change": "the next request had another shape; padding or ragged batches combine such requests",
  "idle instance": "an instance was idle and the delay was 0; max_queue_delay_microseconds makes batches wait for more",
  "one at a time": "the model has no dynamic_batching",
  sequence: "it contains the sequences that had a request",
};

export const milli = (microseconds) => milliseconds(microseconds / 1000);
export const requests = () => get(REQUESTS, { quiet: true });
export const watch = (wish, options) => post(REQUESTS, wish, options).then((response) => response.json());
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const named = (each) => `number ${each.number}${each.id ? ` (${each.id})` : ""} with ${plural(each.rows, "row")}`;

function batchText(batch) {
  if (!batch) return "It was in no batch.";
  const text = [
    `Batch of ${plural(batch.requests, "request")} with ${plural(batch.rows, "row")} on ${batch.instance}, formed because ${WHY[batch.reason] || batch.reason} (${batch.reason}).`,
    `The oldest had waited ${milli(batch.oldest_waited_us)}; ${batch.left_waiting ? plural(batch.left_waiting, "request") : "no request"} stayed in the queue.`,
  ];
  if (batch.with.length) text.push(`Together with ${batch.with.map(named).join(", ")}.`);
  if (batch.others) text.push(`${plural(batch.others, "request")} in the batch ${batch.others === 1 ? "was" : "were"} not recorded.`);
  return text.join(" ");
}

function bar(phase, all) {
  const wide = Math.max(2, (1000 * (phase.end_us - phase.start_us)) / all);
  const left = Math.min(1000 - wide, (1000 * phase.start_us) / all);
  return s("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", "aria-hidden": "true" }, s("rect", { x: left.toFixed(1), y: 0, width: wide.toFixed(1), height: 10 }));
}

export function timelineOf(request) {
  const all = Math.max(0.001, request.total_us);
  const rows = request.phases.map((phase) =>
    h("tr", {}, h("th", { scope: "row" }, phase.name), h("td", {}, bar(phase, all)), h("td", { class: "number" }, milli(phase.end_us - phase.start_us))),
  );
  const head = h("tr", {}, h("th", { scope: "col" }, "Phase"), h("th", { scope: "col" }, "Time"), h("th", { scope: "col", class: "number" }, "Took"));
  return h(
    "div",
    { class: "timeline" },
    h("div", { class: "scroll" }, h("table", {}, h("caption", {}, `${request.outcome || "in progress"}, ${milli(request.total_us)} in all${request.answers > 1 ? `, ${request.answers} answers` : ""}`), h("thead", {}, head), h("tbody", {}, rows))),
    h("p", {}, batchText(request.batch)),
  );
}

// For the playground: let the server record the request with our id, and show its timeline.
export class OwnTimeline {
  constructor(model) {
    this.model = model;
    this.wanted = h("input", { type: "checkbox", checked: true });
    this.place = h("div", { role: "status" });
    this.element = h("section", { class: "card", "aria-label": "Timeline of the request" }, h("label", {}, this.wanted, " Show the timeline of the request"), this.place);
  }

  async expect() {
    if (!this.wanted.checked) return null;
    const id = `console-${Math.random().toString(36).slice(2, 12)}`;
    try {
      await watch({ model: this.model, id }, { quiet: true });
      return id;
    } catch (error) {
      const text = error.status === 401 || error.status === 403 ? "A timeline needs a key with the scope admin." : error.message;
      this.place.replaceChildren(h("p", { class: "soft" }, text));
      return null;
    }
  }

  async show(id) {
    if (!id) return;
    try {
      const found = (await requests()).requests.find((each) => each.id === id);
      this.place.replaceChildren(found ? timelineOf(found) : h("p", { class: "soft" }, "The server did not record the request: another server answered it, or it was refused earlier."));
    } catch (error) {
      this.place.replaceChildren(h("p", { class: "soft" }, error.message));
    }
  }
}
