// SPDX-License-Identifier: Apache-2.0
// A form for the input tensors, from the model's metadata, and a table of its outputs.

import { modelPath, post } from "./api.js";
import { field, h, milliseconds, select } from "./dom.js";
import { inferCode } from "./snippets.js";

const TYPES = ["FP32", "FP64", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "BOOL", "BYTES"];
const FEW = 64;
const SHOWN = 400;
const product = (shape) => shape.reduce((all, each) => all * each, 1);

function sample(datatype, place) {
  if (datatype === "BYTES") return place ? `text ${place}` : "text";
  if (datatype === "BOOL") return place % 2 === 0;
  return datatype.startsWith("FP") ? place / 2 : place;
}

function filled(word, datatype, count) {
  const one = () => {
    if (word === "zeros") return datatype === "BYTES" ? "" : datatype === "BOOL" ? false : 0;
    if (datatype === "BYTES") return Math.random().toString(36).slice(2);
    if (datatype === "BOOL") return Math.random() < 0.5;
    return datatype.startsWith("FP") ? Number(Math.random().toFixed(4)) : Math.floor(Math.random() * 100);
  };
  return Array.from({ length: count }, one);
}

export function shapeOf(text) {
  const parts = text.split(/[\s,x×]+/).filter(Boolean).map(Number);
  if (parts.some((part) => !Number.isInteger(part) || part < 0)) throw new Error(`the shape ${text} is not a list of whole numbers`);
  return parts;
}

function control(input) {
  const asked = input.shape.map((size) => (size < 0 ? 1 : size));
  const type = select((input.datatype ? [input.datatype] : TYPES).map((each) => [each, each]), input.datatype || "FP32");
  const shape = h("input", { value: asked.join(", "), spellcheck: "false" });
  const count = product(asked);
  const start = count <= FEW ? JSON.stringify(Array.from({ length: count }, (_, place) => sample(type.value, place))) : "random";
  const values = h("textarea", { rows: count > 8 ? 4 : 2, spellcheck: "false" });
  values.value = start;
  const element = h(
    "fieldset",
    {},
    h("legend", {}, input.name),
    h("div", { class: "row" }, field("Type", type), field(`Shape (the model takes ${input.shape.join(", ")})`, shape)),
    field("Values: a JSON list, or random, or zeros", values),
  );
  function read() {
    const dims = shapeOf(shape.value);
    const word = values.value.trim();
    let data;
    if (word === "random" || word === "zeros") data = filled(word, type.value, product(dims));
    else {
      try {
        data = JSON.parse(word).flat(Infinity);
      } catch {
        throw new Error(`${input.name}: the values must be a JSON list, such as [1, 2, 3]`);
      }
    }
    if (data.length !== product(dims)) throw new Error(`${input.name}: ${data.length} values do not fill the shape [${dims.join(", ")}], which has ${product(dims)}`);
    return { name: input.name, datatype: type.value, shape: dims, data };
  }
  return { element, read };
}

export function outputTable(outputs) {
  const rows = outputs.map((output) => {
    const all = output.data || [];
    const text = all.slice(0, SHOWN).map((value) => (typeof value === "number" && !Number.isInteger(value) ? Number(value.toPrecision(6)) : value)).join("  ");
    const values = h("pre", { tabindex: "0", role: "region", "aria-label": `Values of ${output.name}` }, all.length > SHOWN ? `${text}  ... ${all.length - SHOWN} more` : text);
    return h("tr", {}, h("th", { scope: "row" }, output.name), h("td", {}, output.datatype), h("td", {}, `[${output.shape.join(", ")}]`), h("td", {}, values));
  });
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["Output", "Type", "Shape", "Values"].map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, rows)));
}

export function tensorForm({ name, version, metadata, code, timeline }) {
  const controls = metadata.inputs.map(control);
  const result = h("div", { class: "result", role: "status" });
  const button = h("button", { class: "main" }, "Send");
  const made = () => ({ inputs: controls.map((each) => each.read()) });
  async function send(event) {
    event.preventDefault();
    try {
      const document = made();
      code.show(inferCode(name, version, document, metadata.outputs));
      button.disabled = true;
      const id = await timeline.expect();
      if (id) document.id = id;
      const before = performance.now();
      const response = await post(`${modelPath(name, version)}/infer`, document).finally(() => timeline.show(id));
      const told = await response.json();
      const took = performance.now() - before;
      result.replaceChildren(h("p", {}, `${told.model_name} version ${told.model_version} answered in ${milliseconds(took)}.`), outputTable(told.outputs));
    } catch (error) {
      result.replaceChildren(h("p", { class: "failed" }, error.message));
    } finally {
      button.disabled = false;
    }
  }
  code.show(inferCode(name, version, made(), metadata.outputs));
  const form = h("form", { class: "card", onsubmit: send }, controls.map((each) => each.element), button, result);
  form.addEventListener("change", () => {
    try {
      code.show(inferCode(name, version, made(), metadata.outputs));
    } catch {
      // The error is shown when the request is sent.
    }
  });
  return { element: form };
}
