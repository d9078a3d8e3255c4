// SPDX-License-Identifier: Apache-2.0
// The console of the local fleet: its pages, the key in the URL, and the fleet's status.

import { changeKey, get, setKey } from "./api.js";
import { field, h, setText } from "./dom.js";
import { eventsPage } from "./fleet_events.js";
import { servicePage } from "./fleet_service.js";
import { frame } from "./frame.js";
import { failed, pill, splitBar, when } from "./saying.js";
import { every, Rows } from "./ticking.js";

const KEY = "#key=";

function cells(each) {
  const path = `#/services/${encodeURIComponent(each.namespace)}/${encodeURIComponent(each.name)}`;
  return [
    h("th", { scope: "row" }, h("a", { href: path }, each.name), h("div", { class: "soft" }, each.namespace)),
    h("td", { class: "reason" }, pill(each.verdict), h("div", { class: "soft" }, each.reason)),
    h("td", {}, each.model || "–", h("div", { class: "soft" }, each.runtime)),
    h("td", { class: "number" }, `${each.ready_replicas} of ${each.replicas}`),
    h("td", {}, each.shares.length ? splitBar(each.shares) : each.traffic || "–"),
    h("td", {}, each.url ? h("a", { href: each.url, target: "_blank", rel: "noreferrer" }, each.url) : "–"),
    h("td", {}, when(each.created)),
  ];
}

function servicesPage(main, wanted) {
  if (wanted) return servicePage(main, wanted);
  const search = h("input", { type: "search", id: "search", autocomplete: "off", spellcheck: "false", "aria-keyshortcuts": "/" });
  const [count, problem] = [h("p", { class: "soft", role: "status" }), h("div")];
  const rows = new Rows("Table of services", ["Service", "State", "Model", "Replicas", "Traffic", "URL", "Created"], cells, "No services. To create one: headrace apply -f FILE");
  async function draw() {
    try {
      const told = await get("console/api/services");
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const found = told.services.filter((each) => words.every((word) => `${each.namespace}/${each.name} ${each.verdict} ${each.model} ${each.runtime} ${each.reason}`.toLowerCase().includes(word)));
      rows.fill(found, (each) => `${each.namespace}/${each.name}`);
      setText(count, `${found.length} ${found.length === 1 ? "service" : "services"}`);
      problem.replaceChildren();
    } catch (error) {
      problem.replaceChildren(failed(error.message));
    }
  }
  search.addEventListener("input", () => ticks.now());
  main.replaceChildren(
    h("h1", {}, "Services"),
    h("div", { class: "bar" }, h("div", { class: "grow" }, field("Search (press /)", search))),
    problem,
    h("div", { class: "card" }, rows.element, h("div", { class: "pager" }, count)),
  );
  const ticks = every(1000, draw);
  return ticks;
}

function tellStatus() {
  const status = document.getElementById("status");
  return every(2000, async () => {
    try {
      const told = await get("console/api/services", { quiet: true });
      const ready = told.services.filter((each) => each.verdict === "ready").length;
      setText(status, `${told.node}: ${ready} of ${told.services.length} ready`);
    } catch (error) {
      setText(status, error.status === 401 ? "a key is needed" : "headrace up does not answer");
    }
  });
}

if (location.hash.startsWith(KEY)) {
  // Keep the key in this tab and remove it from the URL, which others may see.
  setKey(decodeURIComponent(location.hash.slice(KEY.length)));
  history.replaceState(null, "", `${location.pathname}${location.search}#/services`);
}
document.getElementById("key-button").addEventListener("click", () => changeKey("The key is the part after #key= of the URL that `headrace up` printed."));
const show = frame({ services: servicesPage, events: eventsPage }, "services");
show();
tellStatus();
