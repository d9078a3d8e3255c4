
"use strict";
// Shows openapi.json. Whatever comes from the server becomes text, never markup.

const MOST_SHOWN = 20000;
let doc = null;

function make(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

// A description with `code` in it.
function prose(text) {
  const parts = text.split("`").map((part, index) => (index % 2 ? make("code", { text: part }) : part));
  return make("p", {}, ...parts);
}

function found(schema) {
  const name = schema && schema.$ref;
  return name ? name.slice(2).split("/").reduce((place, key) => place[key], doc) : schema;
}

// A schema as a short text: {"name": string, "shape": [integer, ...]}
function typeText(schema, depth = 0) {
  if (schema === true || schema === undefined || depth > 8) return "any";
  if (schema.$ref) return depth > 5 ? schema.$ref.split("/").pop() : typeText(found(schema), depth);
  const options = schema.anyOf || schema.oneOf;
  if (options) return options.map((option) => typeText(option, depth + 1)).join("\n" + "  ".repeat(depth) + "or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.type === "array") return arrayText(schema, depth);
  if (schema.type === "object" || schema.properties) return objectText(schema, depth);
  const exact = Number.isSafeInteger(schema.minimum) && Number.isSafeInteger(schema.maximum);
  const range = exact ? ` ${schema.minimum}..${schema.maximum}` : "";
  return (Array.isArray(schema.type) ? schema.type.join(" | ") : schema.type || "any") + range;
}

function arrayText(schema, depth) {
  if (schema.prefixItems && schema.prefixItems.length) {
    return "[" + schema.prefixItems.map((item) => typeText(item, depth + 1)).join(", ") + "]";
  }
  const least = schema.minItems, most = schema.maxItems;
  const count = least === undefined && most === undefined ? "" : ` (${least ?? 0} to ${most ?? "any"})`;
  return `[${typeText(schema.items, depth + 1)}, ...]${least === most && least ? ` (${least})` : count}`;
}

function objectText(schema, depth) {
  const needed = new Set(schema.required || []);
  const indent = "  ".repeat(depth + 1);
  const lines = Object.entries(schema.properties || {}).map(
    ([name, value]) => `${indent}${JSON.stringify(name)}${needed.has(name) ? "" : "?"}: ${typeText(value, depth + 1)}`);
  for (const [pattern, value] of Object.entries(schema.patternProperties || {})) {
    lines.push(`${indent}/${pattern}/: ${typeText(value, depth + 1)}`);
  }
  const more = schema.additionalProperties;
  if (more) lines.push(`${indent}...: ${typeText(more, depth + 1)}`);
  return lines.length ? `{\n${lines.join(",\n")}\n${"  ".repeat(depth)}}` : "{}";
}

function table(heads, rows) {
  const cell = (value) => make("td", {}, typeof value === "string" ? value : value || "");
  return make("table", {},
    make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { scope: "col", text })))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map(cell)))));
}

function tensorTable(tensors) {
  return table(["Name", "Type", "Shape", ""], tensors.map((tensor) => [
    make("code", { text: tensor.name }), tensor.datatype,
    Array.isArray(tensor.shape) ? `[${tensor.shape.join(", ")}]` : tensor.shape,
    tensor.optional ? "may be left out" : ""]));
}

const quoted = (text) => "'" + text.replaceAll("'", "'\\''") + "'";
const size = (text) => new TextEncoder().encode(text).length;

// One request: {method, path, fields, text, zeroBytes}.
function curlOf(request) {
  const url = quoted(new URL("." + request.path, location.href).href);
  const fields = Object.entries(request.fields).map(([name, value]) => `-H ${quoted(`${name}: ${value}`)}`);
  const method = request.method === "GET" ? [] : ["-X", request.method];
  if (!request.zeroBytes) {
    const body = request.text === null ? [] : ["--data-raw", quoted(request.text)];
    return ["curl -s", ...method, url, ...fields, ...body].join(" ");
  }
  return `{ printf %s ${quoted(request.text)}; head -c ${request.zeroBytes} /dev/zero; } |\n  `
    + ["curl -s", url, ...fields, "--data-binary @-"].join(" ");
}

async function send(request, show) {
  const body = request.text === null ? undefined
    : request.zeroBytes ? new Blob([request.text, new Uint8Array(request.zeroBytes)]) : request.text;
  const started = performance.now();
  const answer = await fetch("." + request.path, { method: request.method, headers: request.fields, body });
  const type = answer.headers.get("content-type") || "";
  const binary = type.startsWith("application/octet-stream");
  const jsonLength = Number(answer.headers.get("inference-header-content-length") || 0);
  let bytes = 0, text = "";
  const decoder = new TextDecoder();
  const reader = answer.body ? answer.body.getReader() : null;
  for (;;) {
    const { done, value } = reader ? await reader.read() : { done: true };
    if (value) {
      const room = binary ? Math.max(0, jsonLength - bytes) : Infinity;
      bytes += value.length;
      if (text.length < MOST_SHOWN) text += decoder.decode(value.subarray(0, room), { stream: true });
    }
    const taken = performance.now() - started;
    if (done) text = pretty(text, type);
    const cut = text.length > MOST_SHOWN ? text.slice(0, MOST_SHOWN) + "\n..." : text;
    show(answer, { taken, bytes, text: cut, more: binary ? bytes - jsonLength : 0, done });
    if (done) return;
  }
}

function pretty(text, type) {
  // A number of so many digits would not survive JavaScript.
  if (!type.startsWith("application/json") || text.length > MOST_SHOWN || /\d{16}/.test(text)) return text;
  try {
    // Lists of numbers stay on one line.
    return JSON.stringify(JSON.parse(text), null, 2).replace(/\[[^[\]{}]*\]/g, (list) => list.replace(/\s+/g, " "));
  } catch {
    return text;
  }
}

// "Try it" and "Copy as curl" for a function that reads a request from its form, and the place for the answer.
function trying(read) {
  const line = make("p", { role: "status" });
  const output = make("pre", { hidden: "", tabindex: "0", "aria-label": "Answer" });
  const show = (answer, told) => {
    const more = told.more ? `, of which ${told.more} are binary` : "";
    line.className = answer.ok ? "good" : "bad";
    line.textContent = `${answer.status} ${answer.statusText} in ${told.taken.toFixed(1)} ms, ${told.bytes} bytes${more}`
      + (told.done ? "" : " so far");
    const reason = answer.headers.get("nv-status");
    output.textContent = [reason && `NV-Status: ${reason}`, told.text].filter(Boolean).join("\n") || "(empty)";
    output.hidden = false;
  };
  const fail = (error) => {
    line.className = "bad";
    line.textContent = String(error && error.message || error);
  };
  const go = make("button", { type: "button", class: "go", text: "Try it" });
  go.addEventListener("click", async () => {
    go.disabled = true;
    line.className = "soft";
    line.textContent = "Waiting for the answer.";
    try { await send(read(), show); } catch (error) { fail(error); }
    go.disabled = false;
  });
  const copy = make("button", { type: "button", text: "Copy as curl" });
  copy.addEventListener("click", async () => {
    let command = "";
    try {
      command = curlOf(read());
      await navigator.clipboard.writeText(command);
      line.className = "soft";
      line.textContent = "Copied.";
    } catch (error) {
      // Without TLS a browser gives no clipboard: show it, to be copied by hand.
      if (!command) return fail(error);
      line.className = "soft";
      line.textContent = "Copy this:";
      output.textContent = command;
      output.hidden = false;
    }
  });
  return make("div", {}, make("div", { class: "buttons" }, go, copy), line, output);
}

function field(label, kind, value = "") {
  const id = `f${field.count = (field.count || 0) + 1}`;
  const input = make("input", { id, value, autocomplete: "off", spellcheck: "false", placeholder: kind });
  return [input, make("div", { class: "field" }, make("label", { for: id, text: label }), input)];
}

function area(label, text) {
  const id = `a${area.count = (area.count || 0) + 1}`;
  const rows = Math.min(24, Math.max(4, text.split("\n").length));
  const input = make("textarea", { id, rows, spellcheck: "false" });
  input.value = text;
  return [input, make("div", {}, make("h3", {}, make("label", { for: id, text: label })), input)];
}

function modelForm(example) {
  const label = example.zero_bytes ? `Request (${example.zero_bytes} zero bytes follow)` : "Request";
  const [input, shown] = area(label, pretty(JSON.stringify(example.body), "application/json"));
  const read = () => {
    const text = input.value;
    const fields = example.zero_bytes
      ? { "content-type": "application/octet-stream", "inference-header-content-length": String(size(text)) }
      : { "content-type": "application/json" };
    return { method: "POST", path: example.path, fields, text, zeroBytes: example.zero_bytes };
  };
  return make("div", {}, shown, trying(read));
}

function routeForm(method, path, operation) {
  const inputs = (operation.parameters || []).map((parameter) => [parameter, ...field(parameter.name, parameter.in)]);
  const content = operation.requestBody ? Object.keys(operation.requestBody.content) : [];
  const [body, shownBody] = content.length ? area("Request", content.includes("application/json") ? "{}" : "") : [null, null];
  const read = () => {
    let target = path;
    const query = new URLSearchParams(), fields = {};
    for (const [parameter, input] of inputs) {
      if (parameter.in === "path") {
        if (!input.value) throw new Error(`Fill in ${parameter.name}.`);
        target = target.replace(`{${parameter.name}}`, encodeURIComponent(input.value));
      } else if (input.value && parameter.in === "query") query.set(parameter.name, input.value);
      else if (input.value) fields[parameter.name] = input.value;
    }
    const text = body && body.value ? body.value : null;
    if (text !== null) fields["content-type"] = content[0];
    return { method, path: target + (query.size ? `?${query}` : ""), fields, text, zeroBytes: 0 };
  };
  return make("div", {}, ...inputs.map((each) => each[2]), shownBody, trying(read));
}

function answers(operation) {
  return table(["Status", "Meaning"], Object.entries(operation.responses).map(
    ([status, answer]) => [status, prose(found(answer).description)]));
}

function inside(method, path, operation) {
  const body = make("div", { class: "inside" });
  const model = operation["x-headrace-model"], example = operation["x-headrace-example"];
  if (operation.description) body.append(prose(operation.description));
  const parameters = operation.parameters || [];
  if (parameters.length && !model) {
    body.append(make("h3", { text: "Parameters" }), table(["Name", "Where", "Meaning"], parameters.map(
      (each) => [make("code", { text: each.name }), each.in, prose(each.description || "")])));
  }
  if (model) {
    body.append(make("h3", { text: "Inputs" }), tensorTable(model.inputs));
    body.append(make("h3", { text: "Outputs" }), tensorTable(model.outputs));
  }
  if (!model) body.append(make("h3", { text: "Try it" }), routeForm(method, path, operation));
  else if (example) body.append(modelForm(example));
  const json = operation.requestBody && operation.requestBody.content["application/json"];
  if (json) body.append(make("h3", { text: "Schema of the request" }), make("pre", { tabindex: "0", text: typeText(json.schema) }));
  const good = found(operation.responses["200"] || {});
  const result = good.content && good.content["application/json"];
  if (result) body.append(make("h3", { text: "Schema of the answer" }), make("pre", { tabindex: "0", text: typeText(result.schema) }));
  body.append(make("h3", { text: "Answers" }), answers(operation));
  return body;
}

function route(method, path, operation) {
  const entry = make("details", { "data-words": `${method} ${path} ${operation.summary}`.toLowerCase() },
    make("summary", {}, make("span", { class: "method", text: method }), make("code", { text: path }),
      make("span", { class: "soft", text: operation.summary })));
  // A server may have hundreds of models: what is inside is made when someone looks.
  entry.addEventListener("toggle", () => {
    if (entry.open && entry.childElementCount === 1) entry.append(inside(method, path, operation));
  });
  return entry;
}

function showGroups() {
  const groups = new Map(doc.tags.map((tag) => [tag.name, []]));
  for (const [path, item] of Object.entries(doc.paths)) {
    for (const [method, operation] of Object.entries(item)) {
      for (const tag of operation.tags) groups.get(tag).push(route(method.toUpperCase(), path, operation));
    }
  }
  const main = document.getElementById("groups");
  main.replaceChildren();
  for (const tag of doc.tags) {
    const entries = groups.get(tag.name);
    if (entries.length) {
      main.append(make("section", {}, make("h2", { text: tag.name }),
        make("p", { class: "soft", text: tag.description || "" }), ...entries));
    }
  }
}

function filter() {
  const words = document.getElementById("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const section of document.querySelectorAll("main section")) {
    let any = false;
    for (const entry of section.querySelectorAll("details")) {
      entry.hidden = !words.every((word) => entry.dataset.words.includes(word));
      any = any || !entry.hidden;
    }
    section.hidden = !any;
  }
}

async function load(model) {
  const notice = document.getElementById("notice");
  const answer = await fetch("openapi.json" + (model ? `?model=${encodeURIComponent(model)}` : ""));
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error || answer.statusText);
  doc = told;
  document.title = `${doc.info.title} API`;
  document.getElementById("title").replaceChildren(doc.info.title, " ", make("small", { text: doc.info.version }));
  document.getElementById("about").replaceChildren(...prose(doc.info.description).childNodes);
  const { shown, loaded } = doc["x-headrace-models"];
  notice.replaceChildren();
  if (shown < loaded) {
    const [input, line] = field(`${shown} of ${loaded} models are shown. Show this one:`, "model");
    const go = make("button", { type: "button", text: "Show", onclick: () => load(input.value).catch(failed) });
    notice.append(line, go);
  }
  showGroups();
  filter();
}

function failed(error) {
  const notice = document.getElementById("notice");
  notice.className = "bad";
  notice.textContent = `openapi.json could not be shown: ${error.message}`;
}

document.getElementById("filter").addEventListener("input", filter);
load("").catch(failed);
