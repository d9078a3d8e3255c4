// SPDX-License-Identifier: Apache-2.0
// The console of the local fleet: services, the page of one service, and events.

import { call, changeKey, get, post, setKey } from "./api.js";
import { splitBar } from "./charts.js";
import { badge, button, byId, bytes, card, confirmed, div, facts, field, h, link, logBox, matches, note, number, outside, perSecond, plural, poll, pollShown, runConfirmed, searchField, searchInput, setText, soft, span, startPages, statusLine, Table, td, th, when, wordsOf } from "./components.js";

const KEY = "#key=";
const servicePath = (namespace, name) => `services/${encodeURIComponent(namespace)}/${encodeURIComponent(name)}`;

const serviceCells = (each) => [
  th(link(`#/${servicePath(each.namespace, each.name)}`, each.name), div("soft", each.namespace)),
  td("reason", badge(each.verdict), div("soft", each.reason)),
  td("", each.model || "–", div("soft", each.runtime)),
  td("", `${each.ready_replicas} of ${each.replicas}`),
  td("", each.shares.length ? splitBar(each.shares) : each.traffic || "–"),
  td("", each.url ? outside(each.url) : "–"),
  td("", when(each.created)),
];

function servicesPage(main, wanted) {
  if (wanted) return servicePage(main, ...wanted.split("/").map(decodeURIComponent));
  const search = searchInput(() => ticks.now());
  const [count, problem] = [statusLine(), div("")];
  const rows = new Table("Table of services", ["Service", "State", "Model", "Replicas", "Traffic", "URL", "Created"], serviceCells, "No services. To create one: headrace apply -f FILE");
  main.replaceChildren(h("h1", {}, "Services"), div("bar", searchField(search)), problem, count, div("card flush", rows.element));
  const ticks = pollShown(1000, problem, async () => {
    const { services } = await get("console/api/services");
    const words = wordsOf(search.value);
    const found = services.filter((each) => matches(words, each.namespace, each.name, each.verdict, each.model, each.runtime, each.reason));
    rows.fill(found, (each) => `${each.namespace}/${each.name}`);
    setText(count, plural(found.length, "service"));
  });
  return ticks;
}

// Events.

const eventKey = (each) => `${each.object} ${each.reason} ${each.message}`;
// `message`: the heading of its text. With `objects`, events of several objects.
function historyTable(label, message, empty, objects = false) {
  const cells = (each) => [td("", when(each.time)), td("", badge(each.type, each.reason)), ...(objects ? [td("", each.object)] : []), td("reason", each.message), td("", String(each.count))];
  return new Table(label, ["Time", "Event", ...(objects ? ["Object"] : []), message, "Times"], cells, empty);
}
const eventTable = () => historyTable("Table of events", "Message", "No events yet.", true);

function eventsPage(main) {
  const [rows, problem] = [eventTable(), div("")];
  main.replaceChildren(h("h1", {}, "Events"), problem, div("card flush", rows.element));
  return pollShown(1000, problem, async () => rows.fill((await get("console/api/events")).events, eventKey));
}

// One InferenceService.

function servicePage(main, namespace, name) {
  const path = `console/api/${servicePath(namespace, name)}`;
  const [mark, about, traffic, problem] = [h("span"), div(""), div(""), div("")];
  const [promote, undo] = [button("Promote", () => roll("promote"), "main", { hidden: true }), button("Undo", () => roll("undo"), "", { hidden: true })];
  const remove = button("Delete", end, "danger");
  let shown = null;
  let before = null;

  const conditions = new Table("Table of conditions", ["Condition", "Status", "Since", "Reason"], (each) => [th(each.type), td("", badge(each.status)), td("", when(each.since)), td("reason", each.reason, div("soft", each.message))], "No conditions yet.");
  const components = new Table("Table of components", ["Component", "Ready", "Bounds", "Rollout", "URL", "Actions"], componentCells, "No components yet.");
  const pods = new Table("Table of replicas", ["Replica", "State", "Requests", "Errors", "In flight", "CPU", "Memory", "Restarts", "Created", "Actions"], podCells, "No replicas.");
  const rollouts = historyTable("Table of rollouts", "Change", "No rollout yet.");
  const scaling = historyTable("Table of scaling decisions", "Why", "It has not been scaled.");
  const events = eventTable();
  const pod = h("select", {}, h("option", { value: "" }, "all replicas"));
  const previous = h("input", { type: "checkbox" });
  const log = logBox(readLog, field("Replica", pod), h("label", { class: "tick" }, previous, "Before the last restart"));
  for (const each of [pod, previous]) each.addEventListener("change", log.look);

  async function readLog(lines) {
    if (!shown?.pods.length) return "";
    const { logs } = await get(`${path}/logs?${new URLSearchParams({ tail: lines, pod: pod.value, previous: previous.checked })}`);
    return logs.map((each) => (logs.length > 1 ? `==> ${each.pod} <==\n${each.text}` : each.text)).join("\n\n");
  }

  function componentCells(each) {
    const bounds = each.least === null && each.most === null ? "–" : `${each.least ?? 1} to ${each.most ?? "any"}`;
    return [
      th(each.name, div("soft", each.mode)),
      td("", `${each.ready} of ${each.replicas}`),
      td("", bounds),
      td("", each.rollout),
      td("", each.url ? outside(each.url) : "–"),
      td("actions-cell", div("actions", button("Scale", () => scale(each), "", { "aria-label": `Scale ${each.name}` }))),
    ];
  }

  function podCells(each) {
    const show = () => {
      pod.value = each.name;
      log.look();
      log.element.scrollIntoView({ block: "nearest" });
    };
    const { requests, errors, outstanding, cores, memory_bytes: memory } = each.metrics;
    return [
      h("th", { scope: "row", class: "mono" }, each.name, div("soft", each.component)),
      td("reason", badge(each.state), div("soft", [each.reason, each.message].filter(Boolean).join(": "))),
      td("", number(requests), each.rate === null ? null : div("soft", perSecond(each.rate))),
      td("", number(errors)),
      td("", number(outstanding)),
      td("", cores === undefined ? "–" : `${number(cores)} cores`),
      td("", bytes(memory)),
      td("", String(each.restarts)),
      td("", when(each.created)),
      td("actions-cell", button("Log", show, "", { "aria-label": `Log of ${each.name}` })),
    ];
  }

  async function scale(component) {
    const input = h("input", { type: "number", min: "0", max: "1000", step: "1", value: String(component.replicas), required: true });
    const content = div("", h("p", {}, `How many replicas of ${component.name} should ${name} have?`), field("Replicas", input));
    if (!(await confirmed(`Scale ${name}`, content, "Scale"))) return;
    await act("scale", { component: component.name, replicas: Number(input.value) }, async (answer) => `${name} is scaled to ${(await answer.json()).replicas}.`);
  }

  async function roll(deed) {
    const texts = {
      promote: ["Promote", `Send all requests of ${name} to the newest revision?`],
      undo: ["Undo", `Send all requests of ${name} to the previous revision? The new replicas stay until a file is applied.`],
    };
    const [word, text] = texts[deed];
    if (!(await confirmed(`${word} ${name}`, text, word, deed === "undo" ? "danger" : "main"))) return;
    await act("rollout", { deed, generation: shown.generation }, () => `${name}: ${deed === "promote" ? "promoted" : "undone"}.`);
  }

  async function end() {
    const text = `Delete ${name}? Its replicas are stopped, and all its data on this machine is removed.`;
    const work = async () => {
      await call(path, { method: "DELETE" });
      location.hash = "#/services";
    };
    await runConfirmed([`Delete ${name}`, text, "Delete", "danger"], name, "deleted", work, "being deleted");
  }

  async function act(verb, asked, told) {
    try {
      note(await told(await post(`${path}/${verb}`, asked)));
    } catch (error) {
      note(`${name}: ${error.message}`);
    }
    ticks.now();
  }

  // Requests per second of each replica, by this answer and the last.
  function withRates(told) {
    const now = performance.now() / 1000;
    const counts = Object.fromEntries(told.pods.map((each) => [each.name, each.metrics.requests]));
    const rate = (each) => (before?.counts[each.name] === undefined || each.metrics.requests === undefined ? null : Math.max(0, each.metrics.requests - before.counts[each.name]) / (now - before.now));
    const rated = told.pods.map((each) => ({ ...each, rate: rate(each) }));
    before = { now, counts };
    return rated;
  }

  function draw(told) {
    shown = told;
    mark.replaceChildren(badge(told.verdict), " ", span("soft", told.reason));
    const canary = told.components.some((each) => each.canary);
    promote.hidden = undo.hidden = !canary;
    remove.disabled = told.verdict === "deleting";
    about.replaceChildren(
      facts([
        ["URL", told.url ? outside(told.url) : null],
        ["Model", told.model],
        ["Model state", told.state ? badge(told.state) : null],
        ["Runtime", told.runtime],
        ["Mode", told.mode],
        ["Replicas ready", `${told.ready_replicas} of ${told.replicas}`],
        ["Failures met", told.failures],
        ["Created", when(told.created)],
      ]),
    );
    traffic.replaceChildren(...told.components.filter((each) => each.canary).map((each) => div("", soft(`${each.name}: ${each.rollout}`), splitBar(each.shares))));
    traffic.parentElement.hidden = !canary;
    conditions.fill(told.conditions, (each) => each.type);
    components.fill(told.components, (each) => each.name);
    pods.fill(withRates(told), (each) => each.name);
    rollouts.fill(told.rollouts, eventKey);
    scaling.fill(told.scaling, eventKey);
    events.fill(told.events, eventKey);
    const names = told.pods.map((each) => each.name);
    if ([...pod.options].slice(1).map((each) => each.value).join() !== names.join()) {
      const kept = pod.value;
      pod.replaceChildren(h("option", { value: "" }, "all replicas"), ...names.map((each) => h("option", { value: each, selected: each === kept }, each)));
    }
  }

  main.replaceChildren(
    h("p", { class: "crumbs" }, link("#/services", "Services"), " / "),
    div("head", h("h1", {}, name), mark, div("actions", promote, undo, remove)),
    problem,
    div(
      "stack",
      div("two", card("About", about), card("Traffic", traffic)),
      card("Replicas", pods.element),
      card("Components", components.element),
      card("Rollout history", rollouts.element),
      card("Scaling decisions", scaling.element),
      card("Conditions", conditions.element),
      log.element,
      card("Events", events.element),
    ),
  );
  const ticks = pollShown(2000, problem, async () => {
    draw(await get(path));
    await log.look();
  });
  return ticks;
}

// Start.

if (location.hash.startsWith(KEY)) {
  // Keep the key in this tab, not in the URL.
  setKey(decodeURIComponent(location.hash.slice(KEY.length)));
  history.replaceState(null, "", `${location.pathname}${location.search}#/services`);
}
byId("key-button").addEventListener("click", () => changeKey("The key is the part after #key= of the URL that `headrace up` printed."));
startPages({ services: servicesPage, events: eventsPage }, "services")();
const status = byId("status");
poll(2000, async () => {
  try {
    const told = await get("console/api/services", { quiet: true });
    const ready = told.services.filter((each) => each.verdict === "ready").length;
    setText(status, `${told.node}: ${ready} of ${told.services.length} ready`);
    status.className = `status ${ready === told.services.length ? "good" : "busy"}`;
  } catch (error) {
    setText(status, error.needsKey ? "API key needed" : "headrace up does not answer");
    status.className = "status bad";
  }
});
