// SPDX-License-Identifier: Apache-2.0
// The same request as code: curl, Python's standard library, and a client library. The key is never included.

import { key, modelPath } from "./api.js";
import { h, note } from "./dom.js";

const LONG = 1500;
const CUT = "...";
const base = () => new URL(".", location.href).href.replace(/\/$/, "");
const single = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
const WORDS = new Map([[true, "True"], [false, "False"], [null, "None"]]);

// A value as Python source; strings and numbers are the same as in JSON.
function python(value) {
  if (WORDS.has(value)) return WORDS.get(value);
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${python(each)}`).join(", ")}}`;
}

function short(document) {
  if (JSON.stringify(document).length <= LONG) return document;
  const inputs = document.inputs?.map((input) => (input.data && JSON.stringify(input.data).length > 200 ? { ...input, data: [CUT] } : input));
  return { ...document, ...(inputs ? { inputs } : {}) };
}

export function inferCode(name, version, document, outputs) {
  const path = `${modelPath(name, version)}/infer`;
  const shown = short(document);
  const inputs = shown.inputs.map((input) => {
    const type = { FP32: "np.float32", FP64: "np.float64", FP16: "np.float16", BOOL: "np.bool_", BYTES: "np.object_" }[input.datatype] || `np.${input.datatype.toLowerCase()}`;
    if (input.data[0] === CUT) return `        ${JSON.stringify(input.name)}: np.zeros(${python(input.shape)}, ${type}),  # your values`;
    return `        ${JSON.stringify(input.name)}: np.array(${python(input.data)}, ${type}).reshape(${python(input.shape)}),`;
  });
  const asked = version ? `, version=${JSON.stringify(version)}` : "";
  return {
    curl: curl(path, shown),
    Python: plain(path, shown, "print(json.load(answer)[\"outputs\"])"),
    "headrace.client": [
      ...imports("import numpy as np", "from headrace.client import Client"), "",
      `with Client(${JSON.stringify(base())}${token()}) as client:`,
      `    result = client.infer(${JSON.stringify(name)}, {`, ...inputs, `    }${asked})`,
      ...outputs.map(({ name: output }) => `    print(result[${JSON.stringify(output)}])`),
    ].join("\n"),
  };
}

export function chatCode(document) {
  const path = "v1/chat/completions";
  const asked = { ...document, stream: true };
  return {
    curl: curl(path, asked).replace("curl ", "curl -N "),
    Python: plain(path, { ...document, stream: false }, 'print(json.load(answer)["choices"][0]["message"]["content"])'),
    openai: [
      ...imports("from openai import OpenAI"), "",
      `client = OpenAI(base_url=${JSON.stringify(`${base()}/v1`)}, api_key=${key() ? KEPT : '"none"'})`,
      `stream = client.chat.completions.create(`,
      ...Object.entries(asked).map(([name, value]) => `    ${name}=${python(value)},`),
      ")",
      "for event in stream:",
      '    print(event.choices[0].delta.content or "", end="", flush=True)',
    ].join("\n"),
  };
}

export function pictureCode(name, version, input, size, scaling, asked, outputs) {
  const path = `${modelPath(name, version)}/infer`;
  const pixels = {
    unit: "pixels /= 255", raw: "",
    signed: "pixels = pixels / 127.5 - 1",
    imagenet: "pixels = (pixels / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]",
  }[scaling];
  const type = input.datatype === "UINT8" ? "np.uint8" : "np.float32";
  const prepare = [
    "import numpy as np", "from PIL import Image", "",
    `image = Image.open("picture.jpg").convert("${input.channels === 1 ? "L" : "RGB"}").resize((${size.width}, ${size.height}))`,
    `pixels = np.asarray(image, np.float32).reshape(${size.height}, ${size.width}, ${input.channels})`,
    ...(pixels ? [pixels] : []),
    ...(input.first ? ["pixels = pixels.transpose(2, 0, 1)"] : []),
    `pixels = np.ascontiguousarray(pixels, ${type}).reshape(${python(input.shape)})`,
  ];
  const bytes = input.shape.reduce((all, each) => all * each, 1) * (input.datatype === "UINT8" ? 1 : 4);
  const header = { inputs: [{ name: input.name, datatype: input.datatype, shape: input.shape, parameters: { binary_data_size: bytes } }], ...(asked ? { outputs: asked } : {}) };
  const text = JSON.stringify(header);
  return {
    curl: [
      "# pixels.raw: pixels.tofile(\"pixels.raw\") in the Python code",
      `printf '%s' ${single(text)} | cat - pixels.raw | \\`,
      `curl ${auth()}-H 'Inference-Header-Content-Length: ${new TextEncoder().encode(text).length}' \\`,
      `  --data-binary @- ${single(`${base()}/${path}`)}`,
    ].join("\n"),
    Python: [
      ...imports("import json, urllib.request"), ...prepare, "",
      `header = json.dumps(${python(header)}).encode()`,
      `request = urllib.request.Request(${JSON.stringify(`${base()}/${path}`)}, header + pixels.tobytes(),`,
      `    {"Inference-Header-Content-Length": str(len(header))${bearer()}})`,
      "with urllib.request.urlopen(request) as answer:",
      '    print(json.load(answer)["outputs"])',
    ].join("\n"),
    "headrace.client": [
      ...imports("from headrace.client import Client"), ...prepare, "",
      `with Client(${JSON.stringify(base())}${token()}) as client:`,
      `    result = client.infer(${JSON.stringify(name)}, {${JSON.stringify(input.name)}: pixels}${version ? `, version=${JSON.stringify(version)}` : ""})`,
      ...outputs.map(({ name: output }) => `    print(result[${JSON.stringify(output)}])`),
    ].join("\n"),
  };
}

const KEPT = 'os.environ["HEADRACE_KEY"]';
const imports = (...lines) => (key() ? ["import os", ...lines] : lines);
const bearer = () => (key() ? `, "Authorization": "Bearer " + ${KEPT}` : "");
const token = () => (key() ? `, token=${KEPT}` : "");
const auth = () => (key() ? `-H "Authorization: Bearer $HEADRACE_KEY" ` : "");
const curl = (path, document) =>
  `curl ${auth()}-H 'Content-Type: application/json' \\\n  ${single(`${base()}/${path}`)} \\\n  -d ${single(JSON.stringify(document))}`;
const plain = (path, document, last) =>
  [
    ...imports("import json, urllib.request"), "",
    `body = json.dumps(${python(document)}).encode()`,
    `request = urllib.request.Request(${JSON.stringify(`${base()}/${path}`)}, body,`,
    `    {"Content-Type": "application/json"${bearer()}})`,
    "with urllib.request.urlopen(request) as answer:",
    `    ${last}`,
  ].join("\n");

export class CodeBox {
  constructor() {
    this.element = h("section", { class: "card", "aria-labelledby": "code-title" }, h("h2", { id: "code-title" }, "As code"));
    this.place = h("div");
    this.element.append(this.place);
  }

  show(codes) {
    const parts = Object.entries(codes).map(([name, text]) =>
      h(
        "details",
        { open: name === "curl" || this.open?.has(name) },
        h("summary", {}, name),
        h("pre", { tabindex: "0", role: "region", "aria-label": `${name} code` }, text),
        h("button", { type: "button", "aria-label": `Copy the ${name} code`, onclick: () => navigator.clipboard.writeText(text).then(() => note("Copied.")) }, "Copy"),
      ),
    );
    this.place.replaceChildren(...parts);
  }
}
