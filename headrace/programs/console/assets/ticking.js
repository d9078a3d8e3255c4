// SPDX-License-Identifier: Apache-2.0
// Poll while the page is visible, and update lists and logs without disturbing focus or selection.

import { field, h, setText } from "./dom.js";

// Run `work` now and at intervals; pause while the tab is hidden. Returns a stop function, whose `now` runs it at once.
export function every(milliseconds, work) {
  let timer = 0;
  let over = false;
  async function turn() {
    clearTimeout(timer);
    if (over) return;
    await work();
    clearTimeout(timer);
    if (!over) timer = setTimeout(() => (document.hidden ? document.addEventListener("visibilitychange", turn, { once: true }) : turn()), milliseconds);
  }
  const stop = () => {
    over = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", turn);
  };
  stop.now = turn;
  turn();
  return stop;
}

const NUMBERS = ["Ready", "Replicas", "Restarts", "Times"];
const PRESSED = "a, button, input, select";

// A table with one row per item. Rows of unchanged items keep their elements; a replaced row keeps the keyboard focus.
export class Rows {
  constructor(label, columns, cells, empty) {
    this.cells = cells;
    this.known = new Map();
    this.body = h("tbody");
    this.nothing = h("p", { class: "empty", hidden: true }, empty);
    this.element = h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
      h("table", {}, h("thead", {}, h("tr", {}, columns.map((text) => h("th", { scope: "col", class: NUMBERS.includes(text) ? "number" : null }, text)))), this.body),
      this.nothing,
    );
  }

  fill(items, keyOf) {
    const seen = new Set();
    let last = null;
    for (const item of items) {
      const [id, text] = [String(keyOf(item)), JSON.stringify(item)];
      seen.add(id);
      let row = this.known.get(id);
      if (row?.text !== text) {
        const made = { text, element: h("tr", {}, this.cells(item)) };
        if (row) this.replace(row.element, made.element);
        this.known.set(id, (row = made));
      }
      const place = last ? last.nextSibling : this.body.firstChild;
      if (place !== row.element) this.body.insertBefore(row.element, place);
      last = row.element;
    }
    for (const [id, row] of this.known) {
      if (seen.has(id)) continue;
      row.element.remove();
      this.known.delete(id);
    }
    this.nothing.hidden = items.length > 0;
  }

  replace(before, after) {
    const at = [...before.querySelectorAll(PRESSED)].indexOf(document.activeElement);
    before.replaceWith(after);
    if (at >= 0) after.querySelectorAll(PRESSED)[at]?.focus();
  }
}

// The end of a log. `read`: returns the text of so many lines. `more`: other fields of the form.
export function logBox(read, ...more) {
  const text = h("pre", { class: "log", tabindex: "0", role: "region", "aria-label": "Lines of the log" });
  const follow = h("input", { type: "checkbox", checked: true });
  const lines = h("select", {}, ["100", "500", "2000"].map((each) => h("option", {}, each)));
  async function look() {
    try {
      const told = await read(Number(lines.value));
      // Keep a selection: the user may be about to copy it.
      if (text.textContent === told || (document.getSelection()?.containsNode(text, true) && !document.getSelection().isCollapsed)) return;
      setText(text, told || "The log is empty.");
      if (follow.checked) text.scrollTop = text.scrollHeight;
    } catch (error) {
      setText(text, error.message);
    }
  }
  lines.addEventListener("change", look);
  const element = h(
    "section",
    { class: "card", "aria-labelledby": "log-title" },
    h("h2", { id: "log-title" }, "Log"),
    h("div", { class: "row" }, ...more, field("Lines", lines), h("label", { class: "tick" }, follow, "Scroll to the end")),
    text,
  );
  return { element, look };
}
