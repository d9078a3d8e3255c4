// SPDX-License-Identifier: Apache-2.0
// The events of the local fleet, live.

import { get } from "./api.js";
import { h } from "./dom.js";
import { failed, pill, when } from "./saying.js";
import { every, Rows } from "./ticking.js";

const COLUMNS = ["Last", "What", "Of", "Message", "Times"];
const cells = (each) => [
  h("td", {}, when(each.time)),
  h("td", {}, pill(each.type, each.reason)),
  h("td", {}, each.object),
  h("td", { class: "reason" }, each.message),
  h("td", { class: "number" }, String(each.count)),
];

export class EventRows extends Rows {
  constructor() {
    super("Table of events", COLUMNS, cells, "No events yet.");
  }

  show(events) {
    this.fill(events, (each) => `${each.object} ${each.reason} ${each.message}`);
  }
}

export function eventsPage(main) {
  const rows = new EventRows();
  const problem = h("div");
  main.replaceChildren(h("h1", {}, "Events"), problem, h("div", { class: "card" }, rows.element));
  return every(1000, async () => {
    try {
      rows.show((await get("console/api/events")).events);
      problem.replaceChildren();
    } catch (error) {
      problem.replaceChildren(failed(error.message));
    }
  });
}
