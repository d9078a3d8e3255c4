// SPDX-License-Identifier: Apache-2.0
// Elements that all pages share: text and numbers, forms, dialogs, tables, cards, progress bars, logs, and navigation.
// Text from a server is never parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

export const missing = (value) => value === null || value === undefined;

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && !missing(value)) element.setAttribute(name, value);
  }
  element.append(...children.flat(2).filter((child) => child !== false && !missing(child)));
  return element;
}

export const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
const tagged = (tag) => (name, ...children) => h(tag, name ? { class: name } : {}, ...children);
export const div = tagged("div");
export const span = tagged("span");
export const td = tagged("td");
export const th = (...children) => h("th", { scope: "row" }, ...children);
export const byId = (id) => document.getElementById(id);
export const svg = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// The title of the browser tab: the page, and the console that it belongs to.
export function setTitle(text) {
  document.title = `${text} – ${document.querySelector(".brand").textContent}`;
}

// Numbers and times.

const orDash = (format) => (value) => (missing(value) || Number.isNaN(value) ? "–" : format(value));

export const number = orDash((value) => {
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  if (size >= 100 || Number.isInteger(value)) return value.toFixed(0);
  return value.toFixed(size >= 10 ? 1 : 2);
});

export const bytes = orDash((value) => {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(value) < 1024 || unit === "GiB") return `${value.toFixed(value < 10 && unit !== "B" ? 1 : 0)} ${unit}`;
    value /= 1024;
  }
});

export const ms = orDash((value) => (value >= 10000 ? `${number(value / 1000)} s` : `${number(value)} ms`));
export const percent = orDash((value) => `${number(value)} %`);
export const share = orDash((value) => percent(100 * value));
export const perSecond = orDash((value) => `${number(value)}/s`);
export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

export function duration(seconds) {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = parts.findIndex(([size]) => seconds >= size);
  if (first < 0) return "0 s";
  return parts.slice(first, first + 2).map(([size, unit], place) => [Math.floor(place ? (seconds % parts[first][0]) / size : seconds / size), unit]).filter(([count], place) => !place || count).map(([count, unit]) => `${count} ${unit}`).join(" ");
}

const two = (value) => String(value).padStart(2, "0");
export const clock = (time, seconds = true) => `${two(time.getHours())}:${two(time.getMinutes())}${seconds ? `:${two(time.getSeconds())}` : ""}`;

// A time of today, or an older one with its date. `value`: ISO text or Unix seconds.
export function when(value) {
  const time = new Date(typeof value === "number" ? 1000 * value : value);
  if (!value || Number.isNaN(time.getTime())) return "–";
  const day = `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())}`;
  const today = time.toDateString() === new Date().toDateString();
  return h("time", { datetime: time.toISOString(), title: `${day} ${clock(time)}`, class: "nowrap" }, today ? clock(time) : `${day} ${clock(time, false)}`);
}

// Small elements.

const TONES = {
  good: "READY,Running,Loaded,True,ready,allowed,Normal,ok,live".split(","),
  busy: "LOADING,UNLOADING,Pending,Started,Canceling,Pausing,Resuming,Loading,Terminating,Unknown,waiting,deleting,Warning".split(","),
  bad: "UNAVAILABLE,Error,Failed,FailedToLoad,False,invalid,failing,denied,failed".split(","),
};
const toneOf = (word) => Object.keys(TONES).find((tone) => TONES[tone].includes(word)) || "";
export const badge = (word, text = word, tone = toneOf(word)) => h("span", { class: `badge ${tone}` }, text);
export const errorBox = (text) => h("p", { class: "error", role: "alert" }, text);
export const soft = (text) => h("p", { class: "soft" }, text);
export const statusLine = () => h("p", { class: "soft", role: "status" });
// An element that can be scrolled with the keyboard.
export const region = (tag, label, properties, ...children) => h(tag, { tabindex: "0", role: "region", "aria-label": label, ...properties }, ...children);
export const button = (text, onclick, kind = "", properties = {}) => h("button", { type: "button", class: kind, onclick, ...properties }, text);
export const link = (href, text, properties = {}) => h("a", { href, ...properties }, text);
export const modelLink = (name) => link(`#/models/${encodeURIComponent(name)}`, name);
export const outside = (url) => link(url, url, { target: "_blank", rel: "noreferrer" });

let ids = 0;
const nextId = () => `id-${(ids += 1)}`;

export function card(title, ...children) {
  const id = nextId();
  return h("section", { class: "card", "aria-labelledby": id }, h("h2", { id }, title), children);
}

// A list of names and values; empty values are left out.
export const facts = (pairs) =>
  h("dl", { class: "facts" }, pairs.filter(([, value]) => !missing(value) && value !== "").map(([name, value]) => div("", h("dt", {}, name), h("dd", {}, value))));

export function note(text) {
  const line = h("p", {}, text);
  byId("notes").append(line);
  setTimeout(() => line.remove(), 8000);
}

export function field(label, control) {
  control.id ||= nextId();
  return div("field", h("label", { for: control.id }, label), control);
}

export function select(options, chosen, changed) {
  const element = h("select", { onchange: () => changed?.(element.value) });
  for (const [value, text] of options) element.append(h("option", { value, selected: value === chosen }, text));
  return element;
}

export const searchInput = (changed, value = "") =>
  h("input", { type: "search", id: "search", value, autocomplete: "off", spellcheck: "false", "aria-keyshortcuts": "/", placeholder: "Search (press /)", oninput: changed });
export const searchField = (input) => div("field grow", h("label", { for: input.id }, "Search"), input);
export const wordsOf = (text) => text.toLowerCase().split(/\s+/).filter(Boolean);
export const matches = (words, ...texts) => words.every((word) => texts.join(" ").toLowerCase().includes(word));

// One of several choices, as buttons beside each other.
export function segments(label, options, chosen, changed) {
  const buttons = options.map(([value, text]) => button(text, () => choose(value), "", { "aria-pressed": String(value === chosen) }));
  function choose(value) {
    buttons.forEach((each, place) => each.setAttribute("aria-pressed", String(options[place][0] === value)));
    changed(value);
  }
  return h("div", { class: "segments", role: "group", "aria-label": label }, buttons);
}

export function copyButton(text, label = "Copy") {
  return button("Copy", () => navigator.clipboard.writeText(text()).then(() => note("Copied."), () => note("The browser does not allow copying here.")), "copy", { "aria-label": label });
}

export const fileAsUrl = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} could not be read`));
    reader.readAsDataURL(file);
  });

// Errors of what a page does.

// Run `work`, and show its error in `place`.
export async function showError(place, work) {
  try {
    await work();
    return true;
  } catch (error) {
    place.replaceChildren(errorBox(error.message));
    return false;
  }
}

// The handler of a form: its button is disabled while `work` runs.
export const onSubmit = (button, place, work) => async (event) => {
  event.preventDefault();
  button.disabled = true;
  await showError(place, work);
  button.disabled = false;
};

// Dialogs.

function openDialog(title, content, yes, kind, answer) {
  return new Promise((resolve) => {
    const dialog = h("dialog", { "aria-labelledby": "dialog-title" });
    const buttons = div("row", button("Cancel", () => dialog.close("")), h("button", { class: kind, value: "yes" }, yes));
    dialog.append(h("form", { method: "dialog" }, h("h2", { id: "dialog-title" }, title), content, buttons));
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes" ? answer() : null);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

// `content`: a text, or form elements.
export const confirmed = async (title, content, yes, kind = "main") =>
  (await openDialog(title, typeof content === "string" ? h("p", {}, content) : content, yes, kind, () => true)) === true;

// Run `work` if the user agrees to `question`, the arguments of `confirmed`; show "NAME is DONE." or why not.
// Returns whether the user agreed.
export async function runConfirmed(question, name, done, work, state = done) {
  if (!(await confirmed(...question))) return false;
  try {
    await work();
    note(`${name} is ${state}.`);
  } catch (error) {
    note(`${name} was not ${done}: ${error.message}`);
  }
  return true;
}

export function askKey(why) {
  const input = h("input", { id: "key", type: "password", autocomplete: "off", spellcheck: "false", autofocus: true });
  const content = div("", h("p", {}, why), h("label", { for: "key" }, "API key"), input, soft("The key is kept in this tab until it is closed, and is sent to this server only."));
  return openDialog("API key", content, "Save", "main", () => input.value.trim());
}

// Tables. On a phone each row is a card: cells name their column, and roles keep them a table.

const NUMBERS = new Set("Requests,Failed,p95,In flight,Waiting,Rows,Took,Queued,Total,Number,Ready,Replicas,Restarts,Times,Count,Batch,CPU,Memory,Errors,Weight,Now,Error rate,p50,p99,p,Share,Compared,Agree,Same class,Dropped,Oldest waited,Left waiting".split(","));
const LONG = new Set(["Why", "Message", "Reason", "Values", "Verdict", "Error"]);
const FOCUSABLE = "a, button, input, select";

function labelled(row, columns) {
  row.setAttribute("role", "row");
  [...row.children].forEach((cell, place) => {
    cell.setAttribute("role", cell.tagName === "TH" ? "rowheader" : "cell");
    if (columns[place] && cell.tagName !== "TH") cell.dataset.label = columns[place];
    if (NUMBERS.has(columns[place])) cell.classList.add("number");
    if (LONG.has(columns[place])) cell.classList.add("reason");
  });
  return row;
}

const headOf = (columns) =>
  h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, columns.map((text) => (text ? h("th", { scope: "col", role: "columnheader", class: NUMBERS.has(text) ? "number" : null }, text) : h("td")))));

// A table that does not change. `rows`: lists of texts or elements; the first is the row's header.
export function table(label, columns, rows, empty = "None.") {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  const body = rows.map((row) => labelled(h("tr", {}, row.map((cell, place) => h(place ? "td" : "th", place ? {} : { scope: "row" }, cell instanceof Node || Array.isArray(cell) ? cell : String(cell)))), columns));
  return region("div", `Table: ${label}`, { class: "scroll" }, h("table", { role: "table", "aria-label": label }, headOf(columns), h("tbody", { role: "rowgroup" }, body)));
}

// A table with one row per item. Unchanged rows keep their elements; a replaced row keeps the keyboard focus.
export class Table {
  constructor(label, columns, cells, empty) {
    this.columns = columns;
    this.cells = cells;
    this.known = new Map();
    this.body = h("tbody", { role: "rowgroup" });
    this.nothing = h("p", { class: "empty", hidden: true }, empty);
    this.table = h("table", { role: "table" }, headOf(columns), this.body);
    this.element = region("div", label, { class: "scroll" }, this.table, this.nothing);
  }

  fill(items, keyOf) {
    const seen = new Set();
    let last = null;
    for (const [place, item] of items.entries()) {
      const [id, text] = [String(keyOf(item, place)), JSON.stringify(item)];
      seen.add(id);
      let row = this.known.get(id);
      if (row?.text !== text) {
        const made = { text, element: labelled(h("tr", {}, this.cells(item)), this.columns) };
        if (row) this.replace(row.element, made.element);
        this.known.set(id, (row = made));
      }
      const next = last ? last.nextSibling : this.body.firstChild;
      if (next !== row.element) this.body.insertBefore(row.element, next);
      last = row.element;
    }
    for (const [id, row] of this.known) {
      if (seen.has(id)) continue;
      row.element.remove();
      this.known.delete(id);
    }
    this.nothing.hidden = items.length > 0;
    this.table.hidden = !items.length;
  }

  replace(before, after) {
    const at = [...before.querySelectorAll(FOCUSABLE)].indexOf(document.activeElement);
    before.replaceWith(after);
    if (at >= 0) after.querySelectorAll(FOCUSABLE)[at]?.focus();
  }
}

// Progress of a load or a download.

const amount = ({ done, total, unit }) => {
  if (!total) return unit === "bytes" && done ? bytes(done) : "";
  return unit === "bytes" ? `${bytes(done)} of ${bytes(total)}` : `${done} of ${total}${unit ? ` ${unit}` : ""}`;
};

export function progressBar(progress) {
  if (!progress) return null;
  // The total is unknown: an indeterminate bar.
  const value = progress.total ? progress.done / progress.total : null;
  return div("loading", h("progress", { max: 1, value, "aria-label": progress.task }), span("soft", [progress.message, amount(progress)].filter(Boolean).join(", ")));
}

// Polling and logs.

// Run `work` now and at intervals; pause while the tab is hidden. Returns a stop function, whose `now` runs it at once.
export function poll(interval, work) {
  let timer = 0;
  let over = false;
  async function turn() {
    clearTimeout(timer);
    if (over) return;
    await work();
    clearTimeout(timer);
    if (!over) timer = setTimeout(() => (document.hidden ? document.addEventListener("visibilitychange", turn, { once: true }) : turn()), interval);
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

// The same; the error of `work` is shown in `problem` until it succeeds.
export const pollShown = (interval, problem, work) => poll(interval, async () => (await showError(problem, work)) && problem.replaceChildren());

// The end of a log. `read`: returns the text of so many lines. `more`: other fields of the form.
export function logBox(read, ...more) {
  const text = region("pre", "Log lines", { class: "log" });
  const follow = h("input", { type: "checkbox", checked: true });
  const lines = select(["100", "500", "2000"].map((each) => [each, each]), "100", () => look());
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
  return { element: card("Log", div("row", ...more, field("Lines", lines), h("label", { class: "tick" }, follow, "Follow")), text), look };
}

// Navigation, theme and keyboard shortcuts.

const THEMES = { auto: "Auto", light: "Light", dark: "Dark" };

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  localStorage.setItem("headrace-theme", name);
  setText(byId("theme-button"), `Theme: ${THEMES[name]}`);
  window.dispatchEvent(new Event("themechange"));
}

// `pages`: by the first part of the URL after `#/`, a function that fills `main` and returns a clean-up function.
// Returns a function that shows the page that the URL names.
export function startPages(pages, first) {
  const main = byId("main");
  let leave = null;

  function show() {
    const [, name = first, ...rest] = location.hash.split("/");
    const page = pages[name] ? name : first;
    leave?.();
    for (const each of document.querySelectorAll("nav a")) {
      if (each.getAttribute("href") === `#/${page}`) each.setAttribute("aria-current", "page");
      else each.removeAttribute("aria-current");
    }
    main.className = page;
    leave = pages[page](main, rest.join("/")) || null;
    setTitle(main.querySelector("h1").textContent);
    if (document.activeElement === document.body) main.focus({ preventScroll: true });
  }

  window.addEventListener("hashchange", () => {
    show();
    main.focus();
    window.scrollTo(0, 0);
  });
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault();
    main.focus();
  });
  byId("theme-button").addEventListener("click", () => {
    const names = Object.keys(THEMES);
    setTheme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
  });
  document.addEventListener("keydown", (event) => {
    const search = byId("search");
    if (event.key === "/" && search && !/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) {
      event.preventDefault();
      search.focus();
    }
  });
  const kept = localStorage.getItem("headrace-theme");
  setTheme(THEMES[kept] ? kept : "auto");
  return show;
}
