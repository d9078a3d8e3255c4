// SPDX-License-Identifier: Apache-2.0
// The requests page: record the next requests of a model, and show the timeline and batch of each.

import { field, h, note, select, setText } from "./dom.js";
import { latest, listen } from "./store.js";
import { milli, requests, timelineOf, watch } from "./timeline.js";

const COLUMNS = ["", "Number", "Id", "Model", "Began", "Outcome", "Rows", "In its batch", "Queued", "Total"];
const NUMBERS = new Set(["Number", "Rows", "In its batch", "Queued", "Total"]);
const MOST = 200;

export function requestsPage(main, wanted) {
  const ready = (latest()?.models || []).filter((model) => model.state === "READY");
  const names = [...new Set(ready.map((model) => model.name))].sort();
  const chosen = wanted ? decodeURIComponent(wanted) : names[0] || "";
  if (chosen && !names.includes(chosen)) names.unshift(chosen);
  const model = select(names.map((name) => [name, name]), chosen);
  const count = h("input", { type: "number", min: "1", max: String(MOST), value: "20" });
  const begin = h("button", { type: "button", class: "main", disabled: !names.length, onclick: () => ask(Number(count.value)) }, "Watch");
  const end = h("button", { type: "button", hidden: true, onclick: () => ask(0) }, "Stop");
  const state = h("p", { class: "soft", role: "status" });
  const body = h("tbody");
  const nothing = h("p", { class: "empty" }, "No requests yet. Press Watch to list the next requests of the model, from any client, for at most a minute.");
  const opened = h("section", { class: "card opened", hidden: true, "aria-label": "Timeline" });
  const rows = new Map();
  let watching = true;
  let open = "";

  main.replaceChildren(
    h("h1", {}, "Requests"),
    h("div", { class: "bar" }, field("Model", model), field(`How many (at most ${MOST})`, count), begin, end),
    state,
    opened,
    h("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "Table of requests" }, h("table", {}, h("thead", {}, h("tr", {}, COLUMNS.map((text) => (text ? h("th", { scope: "col", class: NUMBERS.has(text) ? "number" : null }, text) : h("td"))))), body), nothing),
  );

  async function ask(number) {
    try {
      draw(await watch({ model: model.value, requests: number }));
    } catch (error) {
      note(`${model.value} is not watched: ${error.message}`);
    }
  }

  function draw(told) {
    const running = Object.entries(told.watching);
    watching = running.length > 0;
    end.hidden = !told.watching[model.value];
    setText(state, running.map(([name, { left, seconds }]) => `Watching ${name}: ${left} more, for ${Math.ceil(seconds)} s at most.`).join(" "));
    nothing.hidden = told.requests.length > 0;
    const keys = new Set();
    let at = null;
    for (const request of told.requests.slice(0, MOST)) {
      keys.add(request.key);
      let row = rows.get(request.key);
      if (!row) rows.set(request.key, (row = makeRow(request)));
      row.update(request);
      const place = at ? at.nextSibling : body.firstChild;
      if (place !== row.element) body.insertBefore(row.element, place);
      at = row.element;
    }
    for (const [key, row] of rows) {
      if (keys.has(key)) continue;
      row.element.remove();
      rows.delete(key);
    }
    const shown = told.requests.find((request) => request.key === open);
    opened.hidden = !shown;
    if (shown) opened.replaceChildren(h("h2", {}, `Request ${shown.number} of ${shown.model}${shown.id ? `: ${shown.id}` : ""}`), timelineOf(shown));
  }

  function makeRow(request) {
    const button = h("button", { type: "button", "aria-label": `Open request ${request.number}`, onclick: () => ((open = open === request.key ? "" : request.key), look(true)) }, "Open");
    const cells = COLUMNS.slice(1).map((text) => h("td", { class: NUMBERS.has(text) ? "number" : null }));
    const queued = ({ phases }) => phases.find((phase) => phase.name === "queued");
    return {
      element: h("tr", {}, h("td", {}, button), cells),
      update(now) {
        const waited = queued(now);
        const values = [now.number, now.id || "–", `${now.model}/${now.version}`, new Date(1000 * now.began).toLocaleTimeString(), now.outcome || "in progress", now.rows, now.batch ? now.batch.requests : "–", waited ? milli(waited.end_us - waited.start_us) : "–", milli(now.total_us)];
        cells.forEach((cell, place) => setText(cell, String(values[place])));
        cells[4].className = now.outcome && now.outcome !== "ok" ? "bad" : "";
        button.setAttribute("aria-expanded", String(open === now.key));
      },
    };
  }

  // Poll only while a model is watched: recorded requests do not change afterwards.
  async function look(now) {
    if (!watching && !now) return;
    try {
      draw(await requests());
    } catch (error) {
      watching = false;
      setText(state, error.status === 401 || error.status === 403 ? "Timelines need a key with the scope read." : error.message);
    }
  }

  look(true);
  return listen((error) => error || look(false));
}
