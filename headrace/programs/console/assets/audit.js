// SPDX-License-Identifier: Apache-2.0
// The audit log of an organisation, for its admins.

import { get } from "./api.js";
import { field, h, select, setText } from "./dom.js";
import { failed, pill, when } from "./saying.js";
import { orgPath } from "./session.js";
import { every, Rows } from "./ticking.js";

const COLUMNS = ["Time", "Who", "Operation", "Outcome", "Of", "From", "Reason"];

export function auditPage(main) {
  const search = h("input", { type: "search", id: "search", autocomplete: "off", spellcheck: "false", "aria-keyshortcuts": "/" });
  const most = select(["100", "500", "1000"].map((each) => [each, each]), "100", () => ticks.now());
  const [count, problem] = [h("p", { class: "soft", role: "status" }), h("div")];
  const rows = new Rows("Table of the audit log", COLUMNS, cells, "No entry matches.");
  function cells(each) {
    return [
      h("td", {}, when(each.time)),
      h("td", {}, each.user || "–"),
      h("td", {}, each.operation),
      h("td", {}, pill(each.outcome)),
      h("td", { class: "mono" }, each.target || ""),
      h("td", { class: "mono" }, each.address),
      h("td", { class: "reason" }, each.reason || ""),
    ];
  }
  async function draw() {
    try {
      const { events } = await get(`${orgPath("v2")}/audit?size=${most.value}`);
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const found = events.filter((each) => words.every((word) => Object.values(each).join(" ").toLowerCase().includes(word)));
      const seen = {};
      rows.fill(found, (each) => {
        // Two entries may be identical.
        const text = JSON.stringify(each);
        seen[text] = (seen[text] || 0) + 1;
        return text + seen[text];
      });
      setText(count, `${found.length} of the newest ${events.length}`);
      problem.replaceChildren();
    } catch (error) {
      problem.replaceChildren(failed(error.message));
    }
  }
  search.addEventListener("input", () => ticks.now());
  main.replaceChildren(
    h("h1", {}, "Audit log"),
    h("div", { class: "bar" }, h("div", { class: "grow" }, field("Search (press /)", search)), field("Lines", most)),
    problem,
    h("div", { class: "card" }, rows.element, h("div", { class: "pager" }, count)),
  );
  const ticks = every(5000, draw);
  return ticks;
}
