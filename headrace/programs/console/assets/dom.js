// SPDX-License-Identifier: Apache-2.0
// Create elements and format numbers. Text from a server is never parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
export const s = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Set the title of the browser tab: the page, and the console that it belongs to.
export function entitle(text) {
  document.title = `${text} – ${document.querySelector(".brand").textContent}`;
}

export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  if (size >= 100 || Number.isInteger(value)) return value.toFixed(0);
  return value.toFixed(size >= 10 ? 1 : 2);
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(value) < 1024 || unit === "GiB") return `${value.toFixed(value < 10 && unit !== "B" ? 1 : 0)} ${unit}`;
    value /= 1024;
  }
  return "–";
}

export const milliseconds = (value) => (value === null || value === undefined ? "–" : `${number(value)} ms`);

export function note(text) {
  const line = h("p", {}, text);
  document.getElementById("notes").append(line);
  setTimeout(() => line.remove(), 8000);
}

let fields = 0;
export function field(label, control) {
  fields += 1;
  control.id ||= `field-${fields}`;
  return h("div", {}, h("label", { for: control.id }, label), control);
}

export function select(options, chosen, changed) {
  const made = h("select", { onchange: () => changed?.(made.value) });
  for (const [value, text] of options) made.append(h("option", { value, selected: value === chosen }, text));
  return made;
}
