// SPDX-License-Identifier: Apache-2.0
// Progress bars for the loading of a version and for downloads.

import { bytes, h, setText } from "./dom.js";

const share = ({ done, total, unit }) => {
  if (!total) return unit === "bytes" && done ? bytes(done) : "";
  return unit === "bytes" ? `${bytes(done)} of ${bytes(total)}` : `${done} of ${total}${unit ? ` ${unit}` : ""}`;
};

export class Loading {
  constructor() {
    this.bar = h("progress", { max: 1 });
    this.text = h("span", { class: "soft" });
    this.element = h("div", { class: "loading", hidden: true }, this.bar, this.text);
  }

  show(progress) {
    this.element.hidden = !progress;
    if (!progress) return;
    // The total is unknown: show an indeterminate bar.
    if (progress.total) this.bar.value = progress.done / progress.total;
    else this.bar.removeAttribute("value");
    this.bar.setAttribute("aria-label", progress.task);
    setText(this.text, [progress.message, share(progress)].filter(Boolean).join(", "));
  }
}

export class Tasks {
  constructor() {
    this.element = h("ul", { class: "tasks", hidden: true, "aria-label": "Downloads" });
    this.lines = new Map();
  }

  show(tasks) {
    this.element.hidden = !tasks.length;
    const known = new Set(tasks.map(({ task }) => task));
    for (const [task, { line }] of this.lines) {
      if (known.has(task)) continue;
      line.remove();
      this.lines.delete(task);
    }
    for (const each of tasks) {
      if (!this.lines.has(each.task)) {
        const loading = new Loading();
        const line = h("li", {}, each.task, loading.element);
        this.element.append(line);
        this.lines.set(each.task, { loading, line });
      }
      this.lines.get(each.task).loading.show(each);
    }
  }
}
