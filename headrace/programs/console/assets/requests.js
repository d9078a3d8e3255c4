// SPDX-License-Identifier: Apache-2.0
// Requests: the last and the failed ones; timelines of watched requests, and of the playground's.

import { get, isLanguage, listen, post, readyNames } from "./api.js";
import { badge, button, card, div, field, h, modelLink, ms, note, plural, segments, select, setText, soft, span, statusLine, svg, table, Table, td, when } from "./components.js";

const PATH = "console/api/requests";
const MOST = 200;
const FEW = 20;
const WHY = {
  full: "it could not grow: the maximum size was reached, or the next request did not fit",
  preferred: "it had a preferred size",
  "delay expired": "its oldest request had waited max_queue_delay_microseconds",
  "shape change": "the next request had another shape; padding or ragged batches combine such requests",
  "idle instance": "an instance was idle and the delay was 0; max_queue_delay_microseconds makes batches wait for more",
  "one at a time": "the model has no dynamic_batching",
  sequence: "it contains the sequences that had a request",
};

const micro = (microseconds) => ms(microseconds / 1000);
const read = () => get(PATH, { quiet: true });
const watch = (wish, options) => post(PATH, wish, options).then((response) => response.json());
const named = (each) => `number ${each.number}${each.id ? ` (${each.id})` : ""} with ${plural(each.rows, "row")}`;
const outcomeText = (outcome) => outcome.toLowerCase().replaceAll("_", " ");

function batchText(batch) {
  if (!batch) return "It was in no batch.";
  const text = [
    `Batch of ${plural(batch.requests, "request")} with ${plural(batch.rows, "row")} on ${batch.instance}, formed because ${WHY[batch.reason] || batch.reason} (${batch.reason}).`,
    `The oldest had waited ${micro(batch.oldest_waited_us)}; ${batch.left_waiting ? plural(batch.left_waiting, "request") : "no request"} stayed in the queue.`,
  ];
  if (batch.with.length) text.push(`Together with ${batch.with.map(named).join(", ")}.`);
  if (batch.others) text.push(`${plural(batch.others, "request")} in the batch ${batch.others === 1 ? "was" : "were"} not recorded.`);
  return text.join(" ");
}

function phaseBar(phase, all) {
  const wide = Math.max(2, (1000 * (phase.end_us - phase.start_us)) / all);
  const left = Math.min(1000 - wide, (1000 * phase.start_us) / all);
  return svg("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("rect", { x: left.toFixed(1), y: 0, width: wide.toFixed(1), height: 10 }));
}

function timelineOf(request) {
  const all = Math.max(0.001, request.total_us);
  const rows = request.phases.map((phase) => [phase.name, phaseBar(phase, all), micro(phase.end_us - phase.start_us)]);
  const caption = `${request.outcome || "in progress"}, ${micro(request.total_us)} in all${request.answers > 1 ? `, ${request.answers} answers` : ""}`;
  return div("timeline", h("p", { class: "caption" }, caption), table("Phases", ["Phase", "Time", "Took"], rows), isLanguage(request.model) ? null : h("p", {}, batchText(request.batch)));
}

// For the playground: let the server record the request with our id, and show its timeline.
export class OwnTimeline {
  constructor(model) {
    this.model = model;
    this.wanted = h("input", { type: "checkbox", checked: true });
    this.place = h("div", { role: "status" });
    this.element = h("section", { class: "card", "aria-label": "Request timeline" }, h("label", { class: "tick" }, this.wanted, "Request timeline"), this.place);
  }

  clear() {
    this.place.replaceChildren();
  }

  async expect() {
    this.clear();
    if (!this.wanted.checked) return null;
    const id = `console-${Math.random().toString(36).slice(2, 12)}`;
    try {
      await watch({ model: this.model, id }, { quiet: true });
      return id;
    } catch (error) {
      this.place.replaceChildren(soft(error.needsKey ? "A timeline needs a key with the scope admin." : error.message));
      return null;
    }
  }

  async show(id) {
    if (!id) return;
    try {
      const found = (await read()).requests.find((each) => each.id === id);
      this.place.replaceChildren(found ? timelineOf(found) : soft("The server did not record the request: another server answered it, or it was refused earlier."));
    } catch (error) {
      this.place.replaceChildren(soft(error.message));
    }
  }
}

const recentCells = (request) => [
  td("", when(request.began)),
  td("", h("span", {}, modelLink(request.model), span("soft nowrap", ` / ${request.version}`))),
  td("", badge(request.outcome === "ok" ? "ok" : "failed", outcomeText(request.outcome))),
  td("", ms(request.took_ms)),
  td("", request.rows && !isLanguage(request.model) ? String(request.rows) : "–"),
  td("mono", request.id || "–"),
  td("reason", request.message || ""),
];

export function requestsPage(main, wanted) {
  const names = readyNames();
  const chosen = wanted ? decodeURIComponent(wanted) : "";
  if (chosen && !names.includes(chosen)) names.unshift(chosen);
  const model = select([["", "All models"], ...names.map((name) => [name, name])], chosen, () => draw());
  let kind = "all";
  let shownRows = FEW;
  const more = button("", () => ((shownRows = MOST), draw()), "", { hidden: true });
  const state = statusLine();
  const rows = new Table("Table of requests", ["Time", "Model", "Outcome", "Took", "Rows", "Request id", "Error"], recentCells, "No requests yet.");
  let told = null;

  const watched = select(names.map((name) => [name, name]), chosen || names[0] || "");
  const count = h("input", { type: "number", min: "1", max: String(MOST), value: "20" });
  const begin = button("Record", () => ask(Number(count.value)), "main", { disabled: !names.length });
  const end = button("Stop", () => ask(0), "", { hidden: true });
  const watching = statusLine();
  const opened = h("section", { class: "card opened", hidden: true, "aria-label": "Timeline" });
  const timelines = new Table("Table of timelines", ["Number", "Request id", "Model", "Time", "Outcome", "Rows", "Batch", "Queued", "Total", ""], timelineCells, "No timeline yet. Record shows where the next requests of a model spend their time, for at most a minute.");
  let open = "";

  main.replaceChildren(
    h("h1", {}, "Requests"),
    div("bar", field("Model", model), segments("Outcome", [["all", "All"], ["failed", "Failed"]], kind, (value) => ((kind = value), draw()))),
    state,
    div("card flush", rows.element, more),
    card("Timelines", div("bar", field("Model to record", watched), field(`Requests (at most ${MOST})`, count), begin, end), watching, opened, timelines.element),
  );

  function timelineCells(request) {
    const queued = request.phases.find((phase) => phase.name === "queued");
    const text = open === request.key ? "Close" : "Open";
    return [
      td("", String(request.number)),
      td("mono", request.id || "–"),
      td("", `${request.model}/${request.version}`),
      td("", when(request.began)),
      td("", badge(request.outcome === "ok" ? "ok" : request.outcome ? "failed" : "waiting", request.outcome || "in progress")),
      td("", isLanguage(request.model) ? "–" : String(request.rows)),
      td("", request.batch && !isLanguage(request.model) ? plural(request.batch.requests, "request") : "–"),
      td("", queued ? micro(queued.end_us - queued.start_us) : "–"),
      td("", micro(request.total_us)),
      td("", button(text, () => ((open = open === request.key ? "" : request.key), draw()), "", { "aria-label": `${text} request ${request.number}`, "aria-expanded": String(open === request.key) })),
    ];
  }

  async function ask(wish) {
    try {
      told = await watch({ model: watched.value, requests: wish });
      draw();
    } catch (error) {
      note(`${watched.value} is not recorded: ${error.message}`);
    }
  }

  function draw() {
    if (!told) return;
    const all = kind === "failed" ? told.failed : [...told.recent, ...told.failed].sort((one, other) => other.began - one.began);
    const fitting = all.filter((request) => !model.value || request.model === model.value).slice(0, MOST);
    rows.fill(fitting.slice(0, shownRows), (request) => request.key);
    more.hidden = fitting.length <= shownRows;
    setText(more, `Show all ${fitting.length}`);
    setText(rows.nothing, kind === "failed" ? "No request has failed." : "No requests yet.");
    setText(state, `${plural(fitting.length, "request")}. The server keeps the last 50 answered and the last 50 failed requests of each model version, without their content.`);
    const running = Object.entries(told.watching);
    end.hidden = !told.watching[watched.value];
    setText(watching, running.map(([name, { left, seconds }]) => `Recording ${name}: ${left} more, for ${Math.ceil(seconds)} s at most.`).join(" "));
    timelines.fill(told.requests.slice(0, MOST).map((request) => ({ ...request, open: request.key === open })), (request) => request.key);
    const shown = told.requests.find((request) => request.key === open);
    opened.hidden = !shown;
    if (shown) opened.replaceChildren(h("h3", {}, `Request ${shown.number} of ${shown.model}${shown.id ? `: ${shown.id}` : ""}`), timelineOf(shown));
  }

  async function look() {
    try {
      told = await read();
      draw();
    } catch (error) {
      setText(state, error.needsKey ? "Requests need a key with the scope read." : error.message);
    }
  }

  look();
  return listen((error) => error || look());
}
