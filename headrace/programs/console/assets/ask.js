// SPDX-License-Identifier: Apache-2.0
// A form that sends a request to a service: from its declared parameters, or with a prompt, media and JSON.

import { post } from "./api.js";
import { field, h, number } from "./dom.js";
import { asUrl } from "./files.js";
import { failed } from "./saying.js";
import { orgPath } from "./session.js";

const MEDIA = ["images", "media", "videos"];
const PROMPTS = ["prompt", "input", "text"];
const ANY = [{ name: "prompt", type: "text" }, { name: "media", type: "texts" }];

// A form control and a function that returns its value; undefined for the service's default.
function control({ name, type, default: usual, least, most, choices }) {
  if (choices || type === "truth") {
    const words = choices || ["true", "false"];
    const made = h("select", {}, h("option", { value: "" }, usual === null ? "–" : `default (${usual})`), words.map((word) => h("option", { value: word }, word)));
    return [made, () => (made.value === "" ? undefined : type === "truth" ? made.value === "true" : made.value)];
  }
  if (type === "integer" || type === "number") {
    const made = h("input", { type: "number", min: least, max: most, step: type === "integer" ? 1 : "any", placeholder: usual === null ? "" : String(usual) });
    return [made, () => (made.value === "" ? undefined : Number(made.value))];
  }
  if (type === "object" || type === "any") {
    const made = h("textarea", { rows: 3, spellcheck: "false", placeholder: "JSON" });
    return [made, () => (made.value.trim() ? read(name, made.value) : undefined)];
  }
  const made = h("input", { autocomplete: "off", placeholder: usual === null || usual === undefined ? "" : String(usual) });
  return [made, () => made.value || undefined];
}

function read(name, text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Error(`${name} is not JSON`);
  }
}

export function askForm(job, status) {
  const declared = status.parameters?.length ? status.parameters : ANY;
  const names = declared.map((each) => each.name);
  const media = MEDIA.filter((name) => names.includes(name));
  const prompt = names.find((name) => PROMPTS.includes(name));
  const others = declared.filter((each) => !media.includes(each.name) && each.name !== prompt).map((each) => [each.name, ...control(each)]);
  const text = h("textarea", { rows: 3 });
  const files = h("input", { type: "file", multiple: true, accept: "image/*,video/*" });
  const thumbs = h("div", { class: "thumbs" });
  const more = h("textarea", { rows: 2, spellcheck: "false", placeholder: '{"temperature": 0}' });
  const button = h("button", { class: "main" }, "Ask");
  const result = h("div", { class: "result", role: "status" });

  const small = others.filter(([, element]) => element.tagName !== "TEXTAREA");
  const large = others.filter(([, element]) => element.tagName === "TEXTAREA");
  files.addEventListener("change", async () => {
    const pictures = [...files.files].filter((file) => file.type.startsWith("image/"));
    thumbs.replaceChildren(...(await Promise.all(pictures.map(async (file) => h("img", { src: await asUrl(file), alt: file.name })))));
  });

  async function request() {
    const made = {};
    for (const [name, , value] of others) if (value() !== undefined) made[name] = value();
    if (prompt && text.value) made[prompt] = text.value;
    for (const file of files.files) {
      const wanted = file.type.startsWith("video/") ? "videos" : "images";
      const name = media.includes(wanted) ? wanted : media[0];
      (made[name] ||= []).push(await asUrl(file));
    }
    return { ...made, ...(more.value.trim() ? read("the added text", more.value) : {}) };
  }

  async function send(event) {
    event.preventDefault();
    button.disabled = true;
    result.replaceChildren(h("p", { class: "soft" }, "Asked."));
    const before = performance.now();
    try {
      const body = await request();
      const path = `${orgPath("v1")}/experiments/${job.experiment_id}/jobs/${job.id}/inference_microservice/inference`;
      const told = await (await post(path, body)).json();
      const answer = told.results?.response;
      result.replaceChildren(
        h("p", { class: "soft" }, `${told.status || "answered"} after ${number(performance.now() - before)} ms`),
        ...(typeof answer === "string" ? [h("p", { class: "said" }, answer)] : []),
        h("details", { open: typeof answer !== "string" }, h("summary", {}, "The whole answer"), h("pre", { tabindex: "0", role: "region", "aria-label": "Answer" }, JSON.stringify(told, null, 2))),
      );
    } catch (error) {
      result.replaceChildren(failed(error.message));
    } finally {
      button.disabled = false;
    }
  }

  return h(
    "section",
    { class: "card", "aria-labelledby": "ask-title" },
    h("h2", { id: "ask-title" }, "Ask"),
    h(
      "div",
      { class: "two" },
      h(
        "form",
        { onsubmit: send },
        prompt ? field("Prompt", text) : null,
        media.length ? h("div", { class: "row" }, field("Pictures or videos", files), thumbs) : null,
        h("div", { class: "more" }, small.map(([name, element]) => field(name, element))),
        large.map(([name, element]) => field(name, element)),
        declared === ANY ? field("More, as JSON", more) : null,
        h("div", { class: "row" }, button),
      ),
      result,
    ),
  );
}
