// SPDX-License-Identifier: Apache-2.0
// Models: the list with search and actions; the page of one model; and the report of traffic splits.

import { get, isLanguage, latest, listen, modelPath, models, post, rates, refresh } from "./api.js";
import { barChart, historyCharts, LANGUAGE_CHARTS, MODEL_CHARTS } from "./charts.js";
import { badge, button, card, copyButton, div, errorBox, facts, field, h, link, matches, modelLink, ms, note, number, perSecond, plural, poll, progressBar, region, runConfirmed, searchField, searchInput, select, setText, share, showError, soft, span, statusLine, table, Table, td, th, when, wordsOf } from "./components.js";

const STATES = [["", "All"], ["READY", "Ready"], ["LOADING", "Loading"], ["UNAVAILABLE", "Unavailable"]];
const COLUMNS = ["Model", "Version", "State", "Requests", "p95", "In flight", "Waiting", "Actions"];
let index = [];

async function readIndex() {
  try {
    index = await (await post("v2/repository/index", {}, { quiet: true })).json();
  } catch {
    index = []; // a key without access to the index sees only loaded models
  }
}

// Models that are loaded, failed, or were never loaded.
function entries() {
  const known = new Set(models().map((entry) => entry.name));
  const others = index.filter((entry) => !known.has(entry.name)).map((entry) => ({ version: "", state: "", reason: "", numbers: null, ...entry }));
  return [...models(), ...others].sort((one, other) => one.name.localeCompare(other.name) || Number(one.version) - Number(other.version));
}

const stateText = (entry) => (entry.asleep ? "asleep" : entry.state || "not loaded").toLowerCase();
const reasonOf = (entry) => (entry.reason && entry.reason !== "unloaded" ? entry.reason : "");

const stateCell = (entry) => td("reason", badge(entry.state, stateText(entry)), progressBar(entry.progress), reasonOf(entry) ? div("soft", reasonOf(entry)) : null);

async function act(name, deed) {
  const texts = {
    load: ["Load", `Load ${name}? If it is loaded, it is reloaded from its folder; it serves requests meanwhile.`],
    unload: ["Unload", `Unload ${name}? All its versions stop serving; requests for it are refused until it is loaded again.`],
    sleep: ["Sleep", `Put ${name} to sleep? The next request wakes it.`, "asleep"],
    wake: ["Wake", `Wake ${name}?`, "awake"],
  };
  const [word, text, done] = texts[deed];
  await runConfirmed([`${word} ${name}`, text, word, deed === "unload" ? "danger" : "main"], name, done || `${deed}ed`, () => {
    note(`${word} ${name}: requested.`);
    return post(`${done ? "v1" : "v2/repository"}/models/${encodeURIComponent(name)}/${deed}`, {});
  });
  await readIndex();
  refresh();
}

// They concern all versions of a model.
function actions({ name, state, asleep, control = latest()?.control }) {
  const ready = state === "READY";
  const action = (word, deed, tone, disabled = false) => button(word, () => act(name, deed), tone, { "aria-label": `${word} ${name}`, disabled });
  return [
    ready ? link(`#/playground/${encodeURIComponent(name)}`, "Try", { class: "button", "aria-label": `Try ${name}` }) : null,
    asleep === undefined ? null : asleep ? action("Wake", "wake") : action("Sleep", "sleep"),
    control ? action(ready ? "Reload" : "Load", "load", "", /LOADING/.test(state)) : null,
    control && ready ? action("Unload", "unload", "danger") : null,
  ];
}

function modelCells(entry) {
  const rate = entry.rate || {};
  return [
    th(modelLink(entry.name)),
    td("", entry.version || "–"),
    stateCell(entry),
    td("", perSecond(rate.requests)),
    td("", ms(rate.p95)),
    td("", number(entry.inFlight)),
    td("", number(entry.waiting)),
    td("actions-cell", div("actions", entry.first ? actions(entry) : null)),
  ];
}

export function modelsPage(main) {
  const search = searchInput(draw);
  const wanted = select(STATES, "", draw);
  const count = statusLine();
  const downloads = h("ul", { class: "tasks", hidden: true, "aria-label": "Downloads" });
  const how = h("p", { class: "soft", hidden: true }, "This server loads and unloads models by itself. To do it here, start it with --model-control-mode explicit and a folder of models.");
  const rows = new Table("Table of models", COLUMNS, modelCells, "No model matches.");
  main.replaceChildren(
    h("h1", {}, "Models"),
    div("bar", searchField(search), field("State", wanted), button("Refresh", () => readIndex().then(draw))),
    count,
    downloads,
    div("card flush", rows.element),
    how,
  );

  function draw() {
    const words = wordsOf(search.value);
    const shown = entries().filter((entry) => matches(words, entry.name, entry.version, entry.state, entry.reason) && (!wanted.value || entry.state === wanted.value));
    let before = "";
    const items = shown.map((entry) => {
      const first = entry.name !== before;
      before = entry.name;
      const { name, version, state, reason, progress, numbers, asleep } = entry;
      // Rates are those of all versions, in the first row.
      return { name, version, state, reason, progress, asleep, first, control: latest()?.control, rate: first && numbers ? rates(name) || { requests: 0 } : null, inFlight: numbers?.in_flight, waiting: numbers?.waiting };
    });
    rows.fill(items, (entry) => `${entry.name}/${entry.version}`);
    setText(count, `${plural(new Set(shown.map((entry) => entry.name)).size, "model")}, ${plural(shown.length, "version")}`);
    setText(rows.nothing, search.value || wanted.value ? "No model matches." : "There are no models yet.");
    const tasks = latest()?.tasks || [];
    downloads.hidden = !tasks.length;
    downloads.replaceChildren(...tasks.map((task) => h("li", {}, task.task, progressBar(task))));
    how.hidden = latest()?.control !== false;
  }

  readIndex().then(draw);
  draw();
  return listen((error) => error || draw());
}

// The page of one model.

const shapeText = (shape) => `[${shape.join(", ")}]`;
const tensors = (label, list) => table(label, ["Name", "Type", "Shape"], list.map((each) => [span("mono", each.name), each.datatype || "any", span("mono", shapeText(each.shape))]), "None.");

function scheduling(config) {
  if (config.ensemble_scheduling) return `ensemble of ${plural(config.ensemble_scheduling.step.length, "step")}`;
  if (config.sequence_batching) return "sequence batching";
  if (config.backend === "llm") return "continuous batching";
  if (config.dynamic_batching) return `dynamic batching${config.dynamic_batching.max_queue_delay_microseconds > 0 ? `, waits up to ${ms(config.dynamic_batching.max_queue_delay_microseconds / 1000)}` : ""}`;
  return "one request at a time";
}

const versionCells = (entry) => [
  th(entry.version || "–"),
  stateCell(entry),
  td("", number(entry.numbers?.done)),
  td("", number(entry.numbers?.failed)),
  td("", number(entry.numbers?.in_flight)),
  td("", number(entry.numbers?.waiting)),
];

const errorCells = (failed) => [
  td("", when(failed.began)),
  td("", badge("failed", failed.outcome.toLowerCase().replaceAll("_", " "))),
  td("reason", failed.message || "–"),
  td("mono", failed.id || "–"),
  td("", failed.version),
];

// One bar per batch size; if there are many sizes, one bar per power of two.
function bySize(sizes) {
  const each = Object.entries(sizes).map(([rows, count]) => [Number(rows), count]).sort((one, other) => one[0] - other[0]);
  if (each.length <= 8) return each.map(([rows, count]) => [plural(rows, "row"), count]);
  const ranges = new Map();
  for (const [rows, count] of each) {
    const power = Math.ceil(Math.log2(rows));
    ranges.set(power, (ranges.get(power) || 0) + count);
  }
  return [...ranges].map(([power, count]) => [power ? `${2 ** (power - 1) + 1} to ${2 ** power} rows`.replace("2 to 2", "2") : "1 row", count]);
}

function batchCharts(name) {
  const sizes = {};
  const reasons = [];
  for (const { numbers } of models().filter((model) => model.name === name)) {
    for (const [rows, count] of Object.entries(numbers?.batches || {})) sizes[rows] = (sizes[rows] || 0) + count;
    (numbers?.reasons || []).forEach((count, place) => (reasons[place] = (reasons[place] || 0) + count));
  }
  const why = (latest()?.reasons || []).map((word, place) => [word, reasons[place] || 0]).filter(([, count]) => count);
  return [barChart("Batch sizes since it was loaded", bySize(sizes), "No batch yet."), barChart("Why batches formed", why, "No batch yet.")];
}

export function modelPage(main, name) {
  const language = isLanguage(name);
  const [mark, buttons, problem] = [h("span"), div("actions"), div("")];
  const details = div("stack");
  const batches = div("charts");
  const charts = historyCharts(name, language ? LANGUAGE_CHARTS : MODEL_CHARTS);
  const versions = new Table("Table of versions", ["Version", "State", "Requests", "Failed", "In flight", "Waiting"], versionCells, "No version is loaded.");
  const errors = new Table("Table of errors", ["Time", "Error", "Message", "Request id", "Version"], errorCells, "No request has failed since the model was loaded.");
  const recent = new Table(
    "Table of batches",
    ["Reason", "Rows", "Requests", "Oldest waited", "Left waiting", "Instance"],
    (row) => [td("", row.reason), ...[row.rows, row.requests, ms(row.oldest_waited_microseconds / 1000), row.left_waiting, row.instance].map((text) => td("", String(text)))],
    "No batch yet.",
  );
  const batchCard = card("Last batches", recent.element);
  main.replaceChildren(
    h("p", { class: "crumbs" }, link("#/models", "Models"), " / "),
    div("head", h("h1", {}, name), mark, buttons),
    problem,
    div("stack", charts.element, details, card("Versions", versions.element), card("Last errors", errors.element), ...(language ? [] : [batches, batchCard])),
  );

  let loaded = null;
  let shown = "";
  function draw() {
    const own = entries().filter((entry) => entry.name === name);
    const state = own.find((entry) => entry.state === "READY") || own[own.length - 1];
    const text = JSON.stringify([state?.state, latest()?.control, own.map(reasonOf)]);
    if (text !== shown) {
      shown = text;
      mark.replaceChildren(state ? badge(state.state, stateText(state)) : badge("", "unknown"));
      buttons.replaceChildren(...(state ? actions(state) : []).filter(Boolean));
      const why = own.filter((entry) => entry.state === "UNAVAILABLE" && reasonOf(entry));
      problem.replaceChildren(...why.map((entry) => errorBox(`${entry.version ? `Version ${entry.version}: ` : ""}${reasonOf(entry)}`)));
    }
    versions.fill(own, (entry) => entry.version);
    // A model that never served has no charts and no batches.
    charts.element.hidden = state?.state !== "READY" && !rates(name);
    batches.hidden = batchCard.hidden = state?.state !== "READY";
    if (!language) batches.replaceChildren(...batchCharts(name));
    if (state?.state === "READY" && loaded !== "READY") readDetails();
    if (state?.state !== "READY") details.replaceChildren();
    loaded = state?.state;
  }

  function readDetails() {
    return showError(details, async () => {
      const path = modelPath(name);
      const [metadata, config] = await Promise.all([get(path, { quiet: true }), get(`${path}/config`, { quiet: true })]);
      const text = JSON.stringify(config, null, 2);
      const groups = (config.instance_group || []).map((group) => [group.name || "–", group.kind.replace("KIND_", ""), group.count, group.gpus?.length ? group.gpus.join(", ") : "–"]);
      details.replaceChildren(
        card(
          "About",
          facts([
            ["Backend", config.backend || config.platform],
            ["Scheduling", scheduling(config)],
            ["Maximum batch size", config.max_batch_size ? String(config.max_batch_size) : language ? "" : "no batches"],
            ["Answers", config.model_transaction_policy?.decoupled ? "streamed" : "one per request"],
            ["Versions", metadata.versions?.join(", ")],
          ]),
        ),
        div("two", card("Inputs", tensors("Inputs", metadata.inputs)), card("Outputs", tensors("Outputs", metadata.outputs))),
        card("Instances", table("Instances", ["Name", "Kind", "Count", "GPUs"], groups, "Its steps have the instances.")),
        card("Configuration", h("details", {}, h("summary", {}, "Show as JSON"), copyButton(() => text, "Copy the configuration"), region("pre", "Configuration", {}, text))),
      );
    });
  }

  const stop = poll(3000, async () => {
    try {
      const told = await get("console/api/requests", { quiet: true });
      errors.fill(told.failed.filter((failed) => failed.model === name).slice(0, 10), (failed) => failed.key);
      if (!language && loaded === "READY") {
        const stats = await get(`${modelPath(name)}/stats`, { quiet: true });
        const rows = stats.model_stats.flatMap((each) => each.batching.recent).reverse().slice(0, 8);
        recent.fill(rows, (row, place) => place);
      }
    } catch {
      errors.fill([], () => "");
    }
  });
  readIndex().then(draw);
  draw();
  const ends = [stop, charts.close, listen((error) => error || draw())];
  return () => ends.forEach((end) => end());
}

// Traffic splits.

const probability = (value) => (value === null ? "–" : value < 0.001 ? "< 0.001" : Number(value.toPrecision(2)));

function splitReport(report) {
  const versions = report.versions.map((each) => [
    each.label && each.label !== each.version ? `${each.version} (${each.label})` : each.version, share(each.weight), share(each.effective_weight), each.state, each.requests, each.errors,
    share(each.error_rate), ms(each.latency_ms.p50), ms(each.latency_ms.p99), each.reason,
  ]);
  const parts = [h("h3", {}, "Versions"), table("Versions", ["Version", "Weight", "Now", "State", "Requests", "Errors", "Error rate", "p50", "p99", "Reason"], versions)];
  if (report.shadows.length) {
    const shadows = report.shadows.map((each) => [each.version, share(each.share), each.compared, share(each.agreement), share(each.argmax_agreement), each.errors, each.dropped]);
    parts.push(h("h3", {}, "Shadows"), table("Shadows", ["Version", "Share", "Compared", "Agree", "Same class", "Errors", "Dropped"], shadows));
  }
  const compared = report.comparisons.flatMap((each) =>
    ["errors", "latency"].map((what) => [each.version, each.against, what, each[what].test, probability(each[what].p), each[what].verdict]),
  );
  if (compared.length) parts.push(h("h3", {}, "Comparisons"), table("Comparisons", ["Version", "With", "Of", "Test", "p", "Verdict"], compared));
  return card(report.model, soft(["since ", when(report.since), `, baseline ${report.baseline}`]), parts);
}

export function trafficPage(main) {
  const place = div("stack", soft("Loading."));
  main.replaceChildren(h("h1", {}, "A/B"), place);
  const look = async () => {
    const { splits } = await get("admin/traffic");
    const reports = await Promise.all(splits.map(({ model }) => get(`admin/traffic/${encodeURIComponent(model)}/report`)));
    place.replaceChildren(...(reports.length ? reports.map(splitReport) : [h("p", { class: "empty" }, "No traffic is split. To split it: headrace ab set MODEL 1=0.9 2=0.1")]));
  };
  return poll(3000, () => showError(place, look));
}
