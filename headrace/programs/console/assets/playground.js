// SPDX-License-Identifier: Apache-2.0
// The playground: requests to a model as tensors, as an image or as a chat; and the same request as code.

import { call, get, key, modelPath, models, post, readyNames } from "./api.js";
import { button, card, copyButton, div, errorBox, field, fileAsUrl, h, ms, number, region, segments, select, statusLine, table } from "./components.js";
import { OwnTimeline } from "./requests.js";

// Tensors: a form from the model's metadata, and a table of its outputs.

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

function shapeOf(text) {
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
    div("row", field("Type", type), field(`Shape (model: ${input.shape.join(", ")})`, shape)),
    field("Values (JSON list, random or zeros)", values),
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

function outputTable(outputs) {
  const rows = outputs.map((output) => {
    const all = output.data || [];
    const text = all.slice(0, SHOWN).map((value) => (typeof value === "number" && !Number.isInteger(value) ? Number(value.toPrecision(6)) : value)).join("  ");
    const values = region("pre", `Values of ${output.name}`, {}, all.length > SHOWN ? `${text}  ... ${all.length - SHOWN} more` : text);
    return [output.name, output.datatype, `[${output.shape.join(", ")}]`, values];
  });
  return table("Outputs", ["Output", "Type", "Shape", "Values"], rows);
}

const answered = (told, took) => h("p", {}, `${told.model_name} version ${told.model_version} answered in ${ms(took)}.`);

function tensorForm({ name, version, metadata, code, timeline }) {
  const controls = metadata.inputs.map(control);
  const result = h("div", { class: "result", role: "status" });
  const button = h("button", { class: "main" }, "Send");
  const made = () => ({ inputs: controls.map((each) => each.read()) });
  const showCode = (document) => code.show(inferCode(name, version, document, metadata.outputs));
  async function send(event) {
    event.preventDefault();
    try {
      const document = made();
      showCode(document);
      button.disabled = true;
      const id = await timeline.expect();
      if (id) document.id = id;
      const before = performance.now();
      const response = await post(`${modelPath(name, version)}/infer`, document).finally(() => timeline.show(id));
      const told = await response.json();
      result.replaceChildren(answered(told, performance.now() - before), outputTable(told.outputs));
    } catch (error) {
      result.replaceChildren(errorBox(error.message));
      if (!error.status) timeline.clear();
    } finally {
      button.disabled = false;
    }
  }
  showCode(made());
  const form = h("form", { class: "card", onsubmit: send }, controls.map((each) => each.element), button, result);
  form.addEventListener("change", () => {
    try {
      showCode(made());
    } catch {
      // The error is shown when the request is sent.
    }
  });
  return { element: form };
}

// Pictures: send an image to a classifier or detector as a tensor, and draw the detected boxes on it.

const SCALES = [["unit", "0 to 1"], ["imagenet", "ImageNet's mean and deviation"], ["signed", "-1 to 1"], ["raw", "0 to 255"]];
const MEAN = [0.485, 0.456, 0.406];
const DEVIATION = [0.229, 0.224, 0.225];
const USUAL = 224;
const COLOURS = ["#ff5252", "#40c4ff", "#69f0ae", "#ffd740", "#e040fb", "#ffab40"];

// The model's only input, if it has the shape of an image.
function pictureInput(metadata) {
  if (metadata.inputs.length !== 1) return null;
  const [{ name, datatype, shape }] = metadata.inputs;
  if (!["FP32", "UINT8"].includes(datatype) || shape.length < 3 || shape.length > 4) return null;
  const dims = shape.slice(-3);
  const colours = (size) => size === 3 || size === 1;
  const first = colours(dims[0]);
  if (!first && !colours(dims[2])) return null;
  const [high, wide] = first ? [dims[1], dims[2]] : [dims[0], dims[1]];
  if ((high > 0 && high < 4) || (wide > 0 && wide < 4)) return null;
  return { name, datatype, first, channels: first ? dims[0] : dims[2], batched: shape.length === 4, height: high, width: wide };
}

function pixelsOf(image, size, input, scaling) {
  const canvas = new OffscreenCanvas(size.width, size.height);
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0, size.width, size.height);
  const { data } = context.getImageData(0, 0, size.width, size.height);
  const area = size.width * size.height;
  const { channels, first } = input;
  const made = input.datatype === "UINT8" ? new Uint8Array(area * channels) : new Float32Array(area * channels);
  for (let at = 0; at < area; at += 1) {
    for (let channel = 0; channel < channels; channel += 1) {
      let value = data[4 * at + channel];
      if (channels === 1) value = 0.299 * data[4 * at] + 0.587 * data[4 * at + 1] + 0.114 * data[4 * at + 2];
      if (scaling === "unit") value /= 255;
      else if (scaling === "signed") value = value / 127.5 - 1;
      else if (scaling === "imagenet") value = (value / 255 - MEAN[channel]) / DEVIATION[channel];
      made[first ? channel * area + at : at * channels + channel] = value;
    }
  }
  return made;
}

// The boxes in the usual outputs of detectors, in relative coordinates.
function boxesOf(outputs, scores, size) {
  const named = (pattern, fits) => outputs.find((output) => pattern.test(output.name) && fits(output));
  const boxes = named(/box/i, (output) => output.shape[output.shape.length - 1] === 4);
  if (!boxes) return null;
  const count = boxes.data.length / 4;
  const one = (output) => output.data.length === count;
  const logits = named(/logit/i, (output) => output.data.length % count === 0 && output.data.length > count);
  const certain = named(/score|conf/i, one);
  const classes = named(/label|class/i, one);
  const centred = boxes.name === "pred_boxes";
  const whole = boxes.data.some((value) => value > 1.5);
  const found = [];
  for (let at = 0; at < count; at += 1) {
    let [a, b, c, d] = boxes.data.slice(4 * at, 4 * at + 4);
    if (centred) [a, b, c, d] = [a - c / 2, b - d / 2, a + c / 2, b + d / 2];
    else if (whole) [a, b, c, d] = [a / size.width, b / size.height, c / size.width, d / size.height];
    let score = certain ? certain.data[at] : 1;
    let label = classes ? classes.data[at] : "";
    if (!certain && logits) [label, score] = best(logits.data.slice((at * logits.data.length) / count, ((at + 1) * logits.data.length) / count), scores);
    found.push({ box: [a, b, c, d], score, label: typeof label === "string" ? label : `class ${label}` });
  }
  return found.sort((one_, other) => other.score - one_.score);
}

function best(logits, scores) {
  if (scores === "sigmoid") {
    const place = logits.indexOf(Math.max(...logits));
    return [place, 1 / (1 + Math.exp(-logits[place]))];
  }
  const top = Math.max(...logits);
  const parts = logits.map((value) => Math.exp(value - top));
  const all = parts.reduce((sum, value) => sum + value, 0);
  const real = parts.slice(0, -1); // the last class means "no object"
  const place = real.indexOf(Math.max(...real));
  return [place, real[place] / all];
}

function drawn(canvas, image, found) {
  canvas.width = image.width;
  canvas.height = image.height;
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const unit = Math.max(1, Math.round(Math.max(image.width, image.height) / 300));
  context.lineWidth = 2 * unit;
  context.font = `${8 * unit + 4}px sans-serif`;
  context.textBaseline = "top";
  found.forEach(({ box, score, label }, place) => {
    const [left, top, right, bottom] = [box[0] * image.width, box[1] * image.height, box[2] * image.width, box[3] * image.height];
    context.strokeStyle = context.fillStyle = COLOURS[place % COLOURS.length];
    context.strokeRect(left, top, right - left, bottom - top);
    const text = `${label} ${number(score)}`;
    context.fillRect(left, top, context.measureText(text).width + 6, 8 * unit + 8);
    context.fillStyle = "#000";
    context.fillText(text, left + 3, top + 2);
  });
}

function classRows(output) {
  const rows = output.data.map((text) => text.split(":")).map(([score, place, ...label]) => [label.join(":") || `class ${place}`, place, number(Number(score))]);
  return table("Classes", ["Class", "Number", "Score"], rows);
}

// The JSON before the bytes of a request; `outputs`: those with only some classes wanted.
function pictureHeader({ name, datatype, shape }, outputs) {
  const size = product(shape) * (datatype === "UINT8" ? 1 : 4);
  return { inputs: [{ name, datatype, shape, parameters: { binary_data_size: size } }], ...(outputs ? { outputs } : {}) };
}

function pictureForm({ name, version, metadata, config, code, timeline }) {
  const input = pictureInput(metadata);
  const hugging = config.backend === "huggingface_vision";
  const detects = metadata.outputs.some((output) => /box/i.test(output.name));
  const logits = metadata.outputs.some((output) => /logit/i.test(output.name));
  const number_ = (size) => h("input", { type: "number", min: "1", max: "4096", value: size > 0 ? size : USUAL, disabled: size > 0 });
  const [wide, high] = [number_(input.width), number_(input.height)];
  const scaling = select(SCALES, input.datatype === "UINT8" ? "raw" : hugging ? "imagenet" : "unit", () => tell());
  const scores = select([["softmax", "softmax; the last class means no object (DETR)"], ["sigmoid", "sigmoid (RT-DETR)"]], "softmax", () => show());
  const least = h("input", { type: "range", min: "0", max: "1", step: "0.01", value: "0.5", oninput: () => show() });
  const file = h("input", { type: "file", accept: "image/*", onchange: () => file.files[0] && take(file.files[0]) });
  const canvas = h("canvas", { role: "img", "aria-label": "The picture", hidden: true });
  const result = h("div", { class: "result", role: "status" });
  const drop = div("drop", h("p", {}, "Drop a picture here, or choose one."), field("Picture", file));
  let image = null;
  let told = null;

  const size = () => ({ width: Number(wide.value) || USUAL, height: Number(high.value) || USUAL });
  const shape = () => {
    const dims = input.first ? [input.channels, size().height, size().width] : [size().height, size().width, input.channels];
    return input.batched ? [1, ...dims] : dims;
  };
  const classes = () => {
    const [output] = metadata.outputs;
    const flat = output.shape.length <= 2 && metadata.outputs.length === 1 && /^(FP|U?INT)/.test(output.datatype);
    return flat && !detects ? [{ name: output.name, parameters: { classification: 5 } }] : null;
  };
  const tell = () => code.show(pictureCode(name, version, { ...input, shape: shape() }, size(), scaling.value, classes(), metadata.outputs));

  function show() {
    if (!image || !told) return;
    const found = boxesOf(told.outputs, scores.value, size());
    const kept = found ? found.filter((each) => each.score >= Number(least.value)).slice(0, 100) : [];
    drawn(canvas, image, kept);
    canvas.hidden = false;
    canvas.dataset.boxes = kept.length;
    const named = told.outputs.filter((output) => classes()?.some((each) => each.name === output.name));
    const parts = named.map(classRows);
    if (found) {
      canvas.setAttribute("aria-label", `The picture with ${kept.length} boxes: ${kept.map((each) => each.label).join(", ")}`);
      parts.push(h("p", {}, `${kept.length} of ${found.length} boxes have a score of ${least.value} or more.`));
      parts.push(h("ol", {}, kept.map(({ label, score }) => h("li", {}, `${label}, ${number(score)}`))));
    }
    if (!parts.length || found) parts.push(h("details", {}, h("summary", {}, "Outputs"), outputTable(told.outputs)));
    result.replaceChildren(answered(told, told.took), ...parts);
  }

  async function take(blob) {
    timeline.clear();
    try {
      image = await createImageBitmap(blob);
      drawn(canvas, image, []);
      canvas.hidden = false;
      await send();
    } catch (error) {
      result.replaceChildren(errorBox(error.name === "InvalidStateError" ? "The browser cannot read this file as an image." : error.message));
    }
  }

  async function send() {
    if (!image) return;
    const pixels = pixelsOf(image, size(), input, scaling.value);
    const id = await timeline.expect();
    const header = new TextEncoder().encode(
      JSON.stringify({ ...(id ? { id } : {}), ...pictureHeader({ ...input, shape: shape() }, classes()) }),
    );
    const before = performance.now();
    try {
      const response = await call(`${modelPath(name, version)}/infer`, {
        method: "POST",
        body: new Blob([header, pixels]),
        headers: { "content-type": "application/octet-stream", "inference-header-content-length": String(header.length) },
      }).finally(() => timeline.show(id));
      told = { ...(await response.json()), took: performance.now() - before };
      show();
    } catch (error) {
      result.replaceChildren(errorBox(error.message));
    }
  }

  for (const [kind, over] of [["dragover", true], ["dragleave", false], ["drop", false]]) {
    drop.addEventListener(kind, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", over);
      if (kind === "drop" && event.dataTransfer.files[0]) take(event.dataTransfer.files[0]);
    });
  }
  const form = h(
    "form",
    { class: "card", onsubmit: (event) => (event.preventDefault(), send()), onchange: tell },
    drop,
    div("row", field("Width", wide), field("Height", high), field("Values", scaling)),
    detects ? div("row", logits ? field("Scores", scores) : null, field("Minimum score", least)) : null,
    h("button", { class: "main" }, "Send"),
    canvas,
    result,
  );
  tell();
  return { element: form };
}

// Chat, streamed; with an image or a video for multimodal models.

function part(file, url) {
  const type = file.type.startsWith("video/") ? "video_url" : "image_url";
  return { type, [type]: { url } };
}

const shortened = ({ role, content }) => ({ role, content: typeof content === "string" ? content : content.map((each) => (each.type === "text" ? each : { type: each.type, [each.type]: { url: "data:..." } })) });

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const lines = text.split(/\r?\n/);
    text = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

// Whether a model takes images and videos. What stands behind a proxy is not known, so it may.
const takesFiles = (name, config) => config.backend === "openai_proxy" || models().some((model) => model.name === name && model.numbers?.llm?.multimodal);

function chatForm({ name, config, code, timeline }) {
  const messages = [];
  const hint = h("p", { class: "empty" }, `Write a message to ${name}.`);
  const talk = h("div", { class: "talk", role: "log", "aria-label": "Conversation", tabindex: "0" }, hint);
  const text = h("textarea", { rows: 2, placeholder: "Enter sends, Shift+Enter starts a new line" });
  const system = h("textarea", { rows: 2 });
  const most = h("input", { type: "number", min: "1", max: "100000", value: "128" });
  const heat = h("input", { type: "number", min: "0", max: "2", step: "0.1", value: "0.7" });
  const file = takesFiles(name, config) ? h("input", { type: "file", accept: "image/*,video/*" }) : null;
  const send = h("button", { class: "main" }, "Send");
  const stop = button("Stop", () => running?.abort(), "", { disabled: true });
  const clear = button("Clear", reset);
  const speed = statusLine();
  let running = null;

  const request = (said) => ({
    model: name,
    messages: [...(system.value ? [{ role: "system", content: system.value }] : []), ...said],
    max_tokens: Number(most.value),
    temperature: Number(heat.value),
  });
  const tell = () => {
    const said = messages.length ? messages : [{ role: "user", content: text.value || "Hello" }];
    code.show(chatCode(request(said.map(shortened))));
  };
  function bubble(role, content) {
    hint.remove();
    const words = h("span", {}, content);
    talk.append(h("div", { class: `said ${role}` }, h("strong", {}, role === "user" ? "You" : name), words));
    talk.scrollTop = talk.scrollHeight;
    return words;
  }
  function reset() {
    running?.abort();
    messages.length = 0;
    talk.replaceChildren(hint);
    speed.textContent = "";
    timeline.clear();
    tell();
  }

  async function submit(event) {
    event?.preventDefault();
    const question = text.value.trim();
    if (!question || running) return;
    running = new AbortController();
    send.disabled = true;
    stop.disabled = false;
    speed.textContent = "";
    try {
      const chosen = file?.files[0];
      messages.push({ role: "user", content: chosen ? [{ type: "text", text: question }, part(chosen, await fileAsUrl(chosen))] : question });
      bubble("user", chosen ? `${question} [${chosen.name}]` : question);
      text.value = "";
      if (file) file.value = "";
      tell();
      await answer();
    } catch (error) {
      if (error.name !== "AbortError") {
        messages.pop();
        talk.append(errorBox(error.message));
        talk.scrollTop = talk.scrollHeight;
        timeline.clear();
      }
    } finally {
      running = null;
      send.disabled = false;
      stop.disabled = true;
      text.focus();
    }
  }

  async function answer() {
    const id = await timeline.expect();
    const before = performance.now();
    const response = await call("v1/chat/completions", {
      method: "POST",
      headers: id ? { "x-request-id": id } : {},
      body: JSON.stringify({ ...request(messages), stream: true }),
      signal: running.signal,
    });
    const words = bubble("assistant", "");
    let first = 0;
    let pieces = 0;
    let whole = "";
    let reasoning = "";
    try {
      for await (const event of events(response)) {
        if (event.error) throw new Error(event.error.message || "the answer ended early");
        const { content = "", reasoning_content: thought = "" } = event.choices?.[0]?.delta || {};
        if (!content && !thought) continue;
        first ||= performance.now();
        pieces += 1;
        whole += content;
        reasoning += thought;
        words.textContent = whole || reasoning;
        talk.scrollTop = talk.scrollHeight;
      }
    } finally {
      messages.push({ role: "assistant", content: whole });
      timeline.show(id);
    }
    const seconds = (performance.now() - first) / 1000;
    speed.textContent = pieces ? `First token after ${number(first - before)} ms, then ${number((pieces - 1) / Math.max(0.001, seconds))} chunks/s.` : "The answer was empty.";
  }

  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  });
  const form = h(
    "form",
    { class: "card chat", onsubmit: submit },
    talk,
    field("Message", text),
    file ? field("Image or video", file) : null,
    div("row", send, stop, clear, speed),
  );
  const settings = card("Settings", field("System prompt", system), div("row", field("Max tokens", most), field("Temperature", heat)));
  for (const each of [form, settings]) each.addEventListener("change", tell);
  tell();
  return { element: form, side: settings, leave: () => running?.abort() };
}

// The same request as code: curl, and a Python client. The key is never included.

const LONG = 1500;
const CUT = "...";
const base = () => new URL(".", location.href).href.replace(/\/$/, "");
const single = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
const WORDS = new Map([[true, "True"], [false, "False"], [null, "None"]]);

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

function inferCode(name, version, document, outputs) {
  const path = `${modelPath(name, version)}/infer`;
  const shown = short(document);
  const inputs = shown.inputs.map((input) => {
    const type = { FP32: "np.float32", FP64: "np.float64", FP16: "np.float16", BOOL: "np.bool_", BYTES: "np.object_" }[input.datatype] || `np.${input.datatype.toLowerCase()}`;
    if (input.data[0] === CUT) return `        ${JSON.stringify(input.name)}: np.zeros(${python(input.shape)}, ${type}),  # your values`;
    return `        ${JSON.stringify(input.name)}: np.array(${python(input.data)}, ${type}).reshape(${python(input.shape)}),`;
  });
  return {
    curl: curl(path, shown),
    "headrace.client": [
      ...imports("import numpy as np", "from headrace.client import Client"), "",
      ...clientCode(name, version, `\n${inputs.join("\n")}\n    `, outputs),
    ].join("\n"),
  };
}

function chatCode(document) {
  const path = "v1/chat/completions";
  const asked = { ...document, stream: true };
  return {
    curl: curl(path, asked).replace("curl ", "curl -N "),
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

function pictureCode(name, version, input, size, scaling, asked, outputs) {
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
  const text = JSON.stringify(pictureHeader(input, asked));
  return {
    curl: [
      '# pixels.raw: pixels.tofile("pixels.raw") in the Python code',
      `printf '%s' ${single(text)} | cat - pixels.raw | \\`,
      `curl ${auth()}-H 'Inference-Header-Content-Length: ${new TextEncoder().encode(text).length}' \\`,
      `  --data-binary @- ${single(`${base()}/${path}`)}`,
    ].join("\n"),
    "headrace.client": [
      ...imports("from headrace.client import Client"), ...prepare, "",
      ...clientCode(name, version, `${JSON.stringify(input.name)}: pixels`, outputs),
    ].join("\n"),
  };
}

// `inputs`: lines between the braces.
const clientCode = (name, version, inputs, outputs) => [
  `with Client(${JSON.stringify(base())}${token()}) as client:`,
  `    result = client.infer(${JSON.stringify(name)}, {${inputs}}${version ? `, version=${JSON.stringify(version)}` : ""})`,
  ...outputs.map((output) => `    print(result[${JSON.stringify(output.name)}])`),
];
const KEPT = 'os.environ["HEADRACE_KEY"]';
const imports = (...lines) => (key() ? ["import os", ...lines] : lines);
const token = () => (key() ? `, token=${KEPT}` : "");
const auth = () => (key() ? `-H "Authorization: Bearer $HEADRACE_KEY" ` : "");
const curl = (path, document) =>
  `curl ${auth()}-H 'Content-Type: application/json' \\\n  ${single(`${base()}/${path}`)} \\\n  -d ${single(JSON.stringify(document))}`;
class CodeBox {
  constructor() {
    this.place = div("");
    this.element = card("As code", this.place);
  }

  show(codes) {
    const opened = new Set([...this.place.querySelectorAll("details")].filter((each) => each.open).map((each) => each.dataset.name));
    if (!opened.size) opened.add("curl");
    const parts = Object.entries(codes).map(([name, text]) =>
      h(
        "details",
        { open: opened.has(name), "data-name": name },
        h("summary", {}, name),
        div("code", region("pre", `${name} code`, {}, text), copyButton(() => text, `Copy the ${name} code`)),
      ),
    );
    this.place.replaceChildren(...parts);
  }
}

// The page.

const MODES = { chat: "Chat", picture: "Picture", tensors: "Tensors" };
const FORMS = { chat: chatForm, picture: pictureForm, tensors: tensorForm };
const GENERATES = ["llm", "openai_proxy"];

function modesOf(metadata, config) {
  const modes = [];
  if (GENERATES.includes(config.backend) && config.model_transaction_policy?.decoupled) modes.push("chat");
  if (pictureInput(metadata)) modes.push("picture");
  return [...modes, "tensors"];
}

export function playgroundPage(main, wanted) {
  const names = readyNames();
  const chosen = wanted ? decodeURIComponent(wanted) : names[0] || "";
  const versions = models().filter((model) => model.name === chosen && model.state === "READY").map((model) => model.version);
  if (chosen && !names.includes(chosen)) names.unshift(chosen);
  const place = div("place");
  const modes = div("");
  let leave = null;
  const model = select(names.map((name) => [name, name]), chosen, (name) => (location.hash = `#/playground/${encodeURIComponent(name)}`));
  const version = select([["", "Newest"], ...versions.map((each) => [each, each])], "", () => open());
  main.replaceChildren(div("bar", h("h1", {}, "Playground"), field("Model", model), versions.length > 1 ? field("Version", version) : null, modes), place);

  function show(mode, metadata, config) {
    leave?.();
    const code = new CodeBox();
    const timeline = new OwnTimeline(chosen);
    const form = FORMS[mode]({ name: chosen, version: version.value, metadata, config, code, timeline });
    leave = form.leave || null;
    place.replaceChildren(h("div", { class: `two ${mode}` }, form.element, div("stack", form.side, timeline.element, code.element)));
  }

  async function open() {
    if (!chosen) {
      place.replaceChildren(h("p", { class: "empty" }, "No model is ready."));
      return;
    }
    try {
      const path = modelPath(chosen, version.value);
      const [metadata, config] = await Promise.all([get(path), get(`${path}/config`)]);
      const possible = modesOf(metadata, config);
      modes.replaceChildren(...(possible.length > 1 ? [segments("Mode", possible.map((mode) => [mode, MODES[mode]]), possible[0], (mode) => show(mode, metadata, config))] : []));
      show(possible[0], metadata, config);
    } catch (error) {
      modes.replaceChildren();
      place.replaceChildren(errorBox(error.message));
    }
  }

  open();
  return () => leave?.();
}
