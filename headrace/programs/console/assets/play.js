// SPDX-License-Identifier: Apache-2.0
// The playground: send requests to a model as tensors, as an image or as a chat.

import { get, modelPath } from "./api.js";
import { chatForm } from "./chat.js";
import { field, h, select } from "./dom.js";
import { pictureForm, pictureInput } from "./picture.js";
import { CodeBox } from "./snippets.js";
import { latest } from "./store.js";
import { tensorForm } from "./tensors.js";
import { OwnTimeline } from "./timeline.js";

const WAYS = { chat: "Chat", picture: "Picture", tensors: "Tensors" };
const WRITES = ["llm", "openai_proxy"];

function waysOf(metadata, config) {
  const ways = [];
  if (WRITES.includes(config.backend) && config.model_transaction_policy?.decoupled) ways.push("chat");
  if (pictureInput(metadata)) ways.push("picture");
  ways.push("tensors");
  return ways;
}

export function tryPage(main, wanted) {
  const ready = (latest()?.models || []).filter((model) => model.state === "READY");
  const names = [...new Set(ready.map((model) => model.name))].sort();
  const chosen = wanted ? decodeURIComponent(wanted) : names[0] || "";
  const versions = ready.filter((model) => model.name === chosen).map((model) => model.version);
  if (chosen && !names.includes(chosen)) names.unshift(chosen);
  const place = h("div");
  const ways = h("div");
  let leave = null;
  const model = select(names.map((name) => [name, name]), chosen, (name) => (location.hash = `#/try/${encodeURIComponent(name)}`));
  const version = select([["", "newest"], ...versions.map((each) => [each, each])], "", () => open());
  main.replaceChildren(
    h("h1", {}, "Playground"),
    h("div", { class: "bar" }, field("Model", model), field("Version", version), ways),
    place,
  );

  function show(way, metadata, config) {
    leave?.();
    const code = new CodeBox();
    const forms = { tensors: tensorForm, picture: pictureForm, chat: chatForm };
    const timeline = new OwnTimeline(chosen);
    const form = forms[way]({ name: chosen, version: version.value, metadata, config, code, timeline });
    leave = form.leave || null;
    place.replaceChildren(h("div", { class: "two" }, h("div", { class: "stack" }, form.element, timeline.element), code.element));
  }

  async function open() {
    if (!chosen) {
      place.replaceChildren(h("p", { class: "empty" }, "No model is ready."));
      return;
    }
    try {
      const path = modelPath(chosen, version.value);
      const [metadata, config] = await Promise.all([get(path), get(`${path}/config`)]);
      const possible = waysOf(metadata, config);
      const radios = possible.map((way, at) =>
        h("label", {}, h("input", { type: "radio", name: "way", value: way, checked: at === 0, onchange: () => show(way, metadata, config) }), WAYS[way]),
      );
      ways.replaceChildren(h("fieldset", { class: "plain", hidden: possible.length < 2 }, h("legend", {}, "Ask with"), radios));
      show(possible[0], metadata, config);
    } catch (error) {
      ways.replaceChildren();
      place.replaceChildren(h("p", { class: "failed", role: "alert" }, error.message));
    }
  }

  open();
  return () => leave?.();
}
