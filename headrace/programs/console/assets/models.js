// SPDX-License-Identifier: Apache-2.0
// The models page: versions, states and reasons; search; load and unload. Rows keep their elements while numbers
// change, so that a focused button keeps the keyboard focus.

import { call, post } from "./api.js";
import { confirmed } from "./dialogs.js";
import { field, h, milliseconds, note, number, setText } from "./dom.js";
import { Loading, Tasks } from "./loading.js";
import { history, latest, listen, look, step } from "./store.js";

const COLUMNS = ["Model", "Version", "State", "Requests", "p95", "In flight", "Waiting", "Actions"];
const NUMBERS = new Set(["Requests", "p95", "In flight", "Waiting"]);
const STATES = [["", "all"], ["READY", "ready"], ["LOADING", "loading"], ["UNAVAILABLE", "unavailable"]];
let typed = "";
let index = [];

export function modelsPage(main) {
  const rows = new Map();
  const body = h("tbody");
  const search = h("input", { type: "search", id: "search", value: typed, autocomplete: "off", spellcheck: "false", "aria-keyshortcuts": "/" });
  const wanted = h("select", {}, STATES.map(([value, text]) => h("option", { value }, text)));
  const count = h("p", { class: "soft", role: "status" });
  const tasks = new Tasks();
  const nothing = h("p", { class: "empty", hidden: true });
  const how = h("p", { class: "soft", hidden: true }, "This server loads and unloads models automatically. To do it here, start the server with --model-control-mode explicit and a folder of models.");
  const head = COLUMNS.map((text) => h("th", { scope: "col", class: NUMBERS.has(text) ? "number" : null }, text));
  main.replaceChildren(
    h("h1", {}, "Models"),
    h(
      "div",
      { class: "bar" },
      h("div", { class: "grow" }, field("Search (press /)", search)),
      field("State", wanted),
      h("button", { type: "button", onclick: () => refresh().then(draw) }, "Refresh"),
    ),
    count,
    tasks.element,
    h("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "Table of models" }, h("table", {}, h("thead", {}, h("tr", {}, head)), body), nothing),
    how,
  );

  function draw() {
    const shown = entries().filter((entry) => fits(entry, search.value, wanted.value));
    const keys = new Set();
    const before = history[history.length - 2];
    let at = null;
    let named = null;
    for (const entry of shown) {
      const id = `${entry.name}/${entry.version}`;
      keys.add(id);
      let row = rows.get(id);
      if (!row) rows.set(id, (row = makeRow(entry)));
      row.update(entry, before ? step(before, latest(), id) : null, entry.name !== named);
      named = entry.name;
      const place = at ? at.nextSibling : body.firstChild;
      if (place !== row.element) body.insertBefore(row.element, place);
      at = row.element;
    }
    for (const [id, row] of rows) {
      if (!keys.has(id)) {
        row.element.remove();
        rows.delete(id);
      }
    }
    const models = new Set(shown.map((entry) => entry.name)).size;
    setText(count, `${models} ${models === 1 ? "model" : "models"}, ${shown.length} ${shown.length === 1 ? "version" : "versions"}`);
    nothing.hidden = shown.length > 0;
    tasks.show(latest()?.tasks || []);
    how.hidden = latest()?.control !== false;
    setText(nothing, typed || wanted.value ? "No model matches." : "There are no models yet.");
  }

  search.addEventListener("input", () => {
    typed = search.value;
    draw();
  });
  wanted.addEventListener("change", draw);
  refresh().then(draw);
  draw();
  return listen((error) => error || draw());
}

async function refresh() {
  try {
    index = await (await post("v2/repository/index", {}, { quiet: true })).json();
  } catch {
    index = []; // a key without access to the index sees only loaded models
  }
}

// Models that are loaded or failed to load, and models of the repository that were never loaded.
function entries() {
  const live = latest()?.models || [];
  const known = new Set(live.map((entry) => entry.name));
  const others = index.filter((entry) => !known.has(entry.name)).map((entry) => ({ version: "", state: "", reason: "", numbers: null, ...entry }));
  return [...live, ...others].sort((one, other) => one.name.localeCompare(other.name) || Number(one.version) - Number(other.version));
}

function fits(entry, text, state) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const told = `${entry.name} ${entry.version} ${entry.state} ${entry.reason}`.toLowerCase();
  return words.every((word) => told.includes(word)) && (!state || entry.state === state);
}

function makeRow(entry) {
  const { name } = entry;
  const state = h("span", { class: "state" });
  const reason = h("div", { class: "soft" });
  const loading = new Loading();
  const cells = ["requests", "p95", "in_flight", "waiting"].map(() => h("td", { class: "number" }));
  const load = h("button", { type: "button", onclick: () => act(name, "load") });
  const unload = h("button", { type: "button", class: "danger", "aria-label": `Unload ${name}`, onclick: () => act(name, "unload") }, "Unload");
  const tryIt = h("a", { href: `#/try/${encodeURIComponent(name)}`, "aria-label": `Try ${name}` }, "Try");
  const element = h(
    "tr",
    {},
    h("th", { scope: "row" }, h("a", { href: `#/live/${encodeURIComponent(name)}` }, name)),
    h("td", {}, entry.version || "–"),
    h("td", { class: "reason" }, state, loading.element, reason),
    cells,
    h("td", {}, h("div", { class: "actions" }, tryIt, load, unload)),
  );
  function update(now, made, first) {
    const word = now.state || "not loaded";
    setText(state, word.toLowerCase());
    state.className = `state ${now.state}`;
    loading.show(now.progress);
    setText(reason, now.reason && now.reason !== "unloaded" ? now.reason : "");
    const values = made && now.numbers ? [`${number(made.requests)}/s`, milliseconds(made.p95), number(made.in_flight), number(made.waiting)] : ["–", "–", "–", "–"];
    cells.forEach((cell, place) => setText(cell, values[place]));
    const ready = now.state === "READY";
    setText(load, ready ? "Reload" : "Load");
    load.setAttribute("aria-label", `${ready ? "Reload" : "Load"} ${name}`);
    // Loading and unloading concern all versions: one button per model.
    const may = first && latest()?.control;
    load.hidden = !may;
    load.disabled = now.state === "LOADING" || now.state === "UNLOADING";
    unload.hidden = !may || !ready;
    tryIt.hidden = !ready;
  }
  return { element, update };
}

async function act(name, deed) {
  const texts = {
    load: ["Load", `Load ${name}? If it is loaded, it is reloaded from its folder; it serves requests meanwhile.`],
    unload: ["Unload", `Unload ${name}? All its versions stop serving; requests for it are refused until it is loaded again.`],
  };
  const [word, text] = texts[deed];
  if (!(await confirmed(`${word} ${name}`, text, word, deed === "unload" ? "danger" : "main"))) return;
  note(`${word} ${name}: requested.`);
  try {
    await call(`v2/repository/models/${encodeURIComponent(name)}/${deed}`, { method: "POST", body: "{}" });
    note(`${name} is ${deed}ed.`);
  } catch (error) {
    note(`${name} was not ${deed}ed: ${error.message}`);
  }
  await refresh();
  look();
}
