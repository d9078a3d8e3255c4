// SPDX-License-Identifier: Apache-2.0
// One InferenceService: conditions, components and their shares, replicas, events, logs; scale, roll out, delete.

import { call, get, post } from "./api.js";
import { confirmed } from "./dialogs.js";
import { field, h, note } from "./dom.js";
import { EventRows } from "./fleet_events.js";
import { facts, failed, pill, splitBar, when } from "./saying.js";
import { every, logBox, Rows } from "./ticking.js";

export function servicePage(main, wanted) {
  const [namespace, name] = wanted.split("/").map(decodeURIComponent);
  const path = `console/api/services/${encodeURIComponent(namespace)}/${encodeURIComponent(name)}`;
  const [mark, about, traffic, problem] = [h("span"), h("div"), h("div"), h("div")];
  const [promote, undo] = [button("Promote", "main", () => roll("promote")), button("Undo", "", () => roll("undo"))];
  const remove = button("Delete", "danger", end);
  let latest = null;

  const conditions = new Rows("Table of conditions", ["Condition", "Status", "Since", "Reason"], (each) => [h("th", { scope: "row" }, each.type), h("td", {}, pill(each.status)), h("td", {}, when(each.since)), h("td", { class: "reason" }, each.reason, h("div", { class: "soft" }, each.message))], "No conditions yet.");
  const components = new Rows("Table of components", ["Component", "Ready", "Bounds", "Rollout", "URL", "Actions"], componentCells, "No components yet.");
  const pods = new Rows("Table of replicas", ["Replica", "State", "Restarts", "Component", "Created", "Actions"], podCells, "No replicas.");
  const events = new EventRows();
  const pod = h("select", {}, h("option", { value: "" }, "all replicas"));
  const previous = h("input", { type: "checkbox" });
  const log = logBox(readLog, field("Of", pod), h("label", { class: "tick" }, previous, "Before the last restart"));
  for (const each of [pod, previous]) each.addEventListener("change", log.look);

  async function readLog(lines) {
    if (!latest?.pods.length) return "";
    const { logs } = await get(`${path}/logs?${new URLSearchParams({ tail: lines, pod: pod.value, previous: previous.checked })}`);
    return logs.map((each) => (logs.length > 1 ? `==> ${each.pod} <==\n${each.text}` : each.text)).join("\n\n");
  }

  function button(word, kind, deed) {
    return h("button", { type: "button", class: kind, onclick: deed }, word);
  }

  function componentCells(each) {
    const bounds = each.least === null && each.most === null ? "–" : `${each.least ?? 1} to ${each.most ?? "any"}`;
    return [
      h("th", { scope: "row" }, each.name, h("div", { class: "soft" }, each.mode)),
      h("td", { class: "number" }, `${each.ready} of ${each.replicas}`),
      h("td", {}, bounds),
      h("td", {}, each.rollout),
      h("td", {}, each.url ? h("a", { href: each.url, target: "_blank", rel: "noreferrer" }, each.url) : "–"),
      h("td", {}, h("div", { class: "actions" }, h("button", { type: "button", "aria-label": `Scale ${each.name}`, onclick: () => scale(each) }, "Scale"))),
    ];
  }

  function podCells(each) {
    const show = () => {
      pod.value = each.name;
      log.look();
      log.element.scrollIntoView({ block: "nearest" });
    };
    return [
      h("th", { scope: "row", class: "mono" }, each.name),
      h("td", { class: "reason" }, pill(each.state), h("div", { class: "soft" }, [each.reason, each.message].filter(Boolean).join(": "))),
      h("td", { class: "number" }, String(each.restarts)),
      h("td", {}, each.component || "–"),
      h("td", {}, when(each.created)),
      h("td", {}, h("button", { type: "button", "aria-label": `Log of ${each.name}`, onclick: show }, "Log")),
    ];
  }

  async function scale(component) {
    const input = h("input", { type: "number", min: "0", max: "1000", step: "1", value: String(component.replicas), required: true });
    const content = h("div", {}, h("p", {}, `How many replicas of ${component.name} should ${name} have?`), field("Replicas", input));
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
    await act("rollout", { deed, generation: latest.generation }, () => `${name}: ${deed === "promote" ? "promoted" : "undone"}.`);
  }

  async function end() {
    if (!(await confirmed(`Delete ${name}`, `Delete ${name}? Its replicas are stopped, and all its data on this machine is removed.`, "Delete", "danger"))) return;
    try {
      await call(path, { method: "DELETE" });
      note(`${name} is being deleted.`);
      location.hash = "#/services";
    } catch (error) {
      note(`${name} was not deleted: ${error.message}`);
    }
  }

  async function act(verb, asked, told) {
    try {
      note(await told(await post(`${path}/${verb}`, asked)));
    } catch (error) {
      note(`${name}: ${error.message}`);
    }
    ticks.now();
  }

  function draw(told) {
    latest = told;
    mark.replaceChildren(pill(told.verdict), " ", h("span", { class: "soft" }, told.reason));
    const canary = told.components.some((each) => each.canary);
    promote.hidden = undo.hidden = !canary;
    remove.disabled = told.verdict === "deleting";
    about.replaceChildren(
      facts([
        ["URL", told.url ? h("a", { href: told.url, target: "_blank", rel: "noreferrer" }, told.url) : null],
        ["Model", told.model],
        ["Model state", told.state ? pill(told.state) : null],
        ["Runtime", told.runtime],
        ["Mode", told.mode],
        ["Replicas ready", `${told.ready_replicas} of ${told.replicas}`],
        ["Created", when(told.created)],
      ]),
    );
    traffic.replaceChildren(...told.components.filter((each) => each.canary).map((each) => h("div", {}, h("p", { class: "soft" }, `${each.name}: ${each.rollout}`), splitBar(each.shares))));
    traffic.parentElement.hidden = !canary;
    conditions.fill(told.conditions, (each) => each.type);
    components.fill(told.components, (each) => each.name);
    pods.fill(told.pods, (each) => each.name);
    events.show(told.events);
    const names = told.pods.map((each) => each.name);
    if ([...pod.options].slice(1).map((each) => each.value).join() !== names.join()) {
      const kept = pod.value;
      pod.replaceChildren(h("option", { value: "" }, "all replicas"), ...names.map((each) => h("option", { value: each, selected: each === kept }, each)));
    }
  }

  const card = (title, ...inside) => h("section", { class: "card", "aria-label": title }, h("h2", {}, title), inside);
  promote.hidden = undo.hidden = true;
  main.replaceChildren(
    h("div", { class: "head" }, h("h1", {}, name), mark, h("div", { class: "actions" }, promote, undo, remove)),
    problem,
    h("div", { class: "stack" }, h("div", { class: "two" }, card("About", about), card("Traffic", traffic)), card("Replicas", pods.element), card("Components", components.element), card("Conditions", conditions.element), log.element, card("Events", events.element)),
  );
  const ticks = every(1000, async () => {
    try {
      draw(await get(path));
      await log.look();
      problem.replaceChildren();
    } catch (error) {
      problem.replaceChildren(failed(error.message));
    }
  });
  return ticks;
}
