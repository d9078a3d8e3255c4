// SPDX-License-Identifier: Apache-2.0
// Send an image to a classifier or detector as a tensor, and draw the detected boxes on it.

import { call, modelPath } from "./api.js";
import { field, h, milliseconds, number, select } from "./dom.js";
import { pictureCode } from "./snippets.js";
import { outputTable } from "./tensors.js";

const SCALES = [["unit", "0 to 1"], ["imagenet", "ImageNet's mean and deviation"], ["signed", "-1 to 1"], ["raw", "0 to 255"]];
const MEAN = [0.485, 0.456, 0.406];
const DEVIATION = [0.229, 0.224, 0.225];
const USUAL = 224;
const COLOURS = ["#ff5252", "#40c4ff", "#69f0ae", "#ffd740", "#e040fb", "#ffab40"];

// The model's only input, if it has the shape of an image: one or three channels, first or last.
export function pictureInput(metadata) {
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
export function boxesOf(outputs, scores, size) {
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
  const rows = output.data.map((text) => text.split(":"));
  return h(
    "table",
    {},
    h("thead", {}, h("tr", {}, ["Class", "Number", "Score"].map((text) => h("th", { scope: "col" }, text)))),
    h("tbody", {}, rows.map(([score, place, ...label]) => h("tr", {}, h("th", { scope: "row" }, label.join(":") || `class ${place}`), h("td", {}, place), h("td", {}, number(Number(score)))))),
  );
}

export function pictureForm({ name, version, metadata, config, code, timeline }) {
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
  const drop = h("div", { class: "drop" }, h("p", {}, "Drop a picture here, or choose one."), field("Picture", file));
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
    const what = h("p", {}, `${told.model_name} version ${told.model_version} answered in ${milliseconds(told.took)}.`);
    const named = told.outputs.filter((output) => classes()?.some((each) => each.name === output.name));
    const parts = named.map(classRows);
    if (found) {
      canvas.setAttribute("aria-label", `The picture with ${kept.length} boxes: ${kept.map((each) => each.label).join(", ")}`);
      parts.push(h("p", {}, `${kept.length} of ${found.length} boxes have a score of ${least.value} or more.`));
      parts.push(h("ol", {}, kept.map(({ label, score }) => h("li", {}, `${label}, ${number(score)}`))));
    }
    if (!parts.length || found) parts.push(h("details", {}, h("summary", {}, "Outputs"), outputTable(told.outputs)));
    result.replaceChildren(what, ...parts);
  }

  async function take(blob) {
    try {
      image = await createImageBitmap(blob);
      drawn(canvas, image, []);
      canvas.hidden = false;
      await send();
    } catch (error) {
      result.replaceChildren(h("p", { class: "failed" }, error.name === "InvalidStateError" ? "The browser cannot read this file as an image." : error.message));
    }
  }

  async function send() {
    if (!image) return;
    const pixels = pixelsOf(image, size(), input, scaling.value);
    const asked = classes();
    const id = await timeline.expect();
    const header = new TextEncoder().encode(
      JSON.stringify({ ...(id ? { id } : {}), inputs: [{ name: input.name, datatype: input.datatype, shape: shape(), parameters: { binary_data_size: pixels.byteLength } }], ...(asked ? { outputs: asked } : {}) }),
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
      result.replaceChildren(h("p", { class: "failed" }, error.message));
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
    h("div", { class: "row" }, field("Width", wide), field("Height", high), field("Values", scaling)),
    detects ? h("div", { class: "row" }, logits ? field("Scores", scores) : null, field("Minimum score of a box", least)) : null,
    h("button", { class: "main" }, "Send again"),
    canvas,
    result,
  );
  tell();
  return { element: form };
}
