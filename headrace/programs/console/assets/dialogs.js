// SPDX-License-Identifier: Apache-2.0
// Questions to the reader: a key, or whether something is really to be done.

import { h } from "./dom.js";

function ask(title, content, yes, kind, answer) {
  return new Promise((resolve) => {
    const dialog = h("dialog", { "aria-labelledby": "dialog-title" });
    const form = h(
      "form",
      { method: "dialog" },
      h("h2", { id: "dialog-title" }, title),
      content,
      h(
        "div",
        { class: "row" },
        h("button", { type: "button", onclick: () => dialog.close("") }, "Cancel"),
        h("button", { class: kind, value: "yes" }, yes),
      ),
    );
    dialog.append(form);
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes" ? answer() : null);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

// `content`: a sentence, or a part of a form.
export const confirmed = async (title, content, yes, kind = "main") =>
  (await ask(title, typeof content === "string" ? h("p", {}, content) : content, yes, kind, () => true)) === true;

export function askKey(why) {
  const input = h("input", { id: "key", type: "password", autocomplete: "off", spellcheck: "false", autofocus: true });
  const content = h(
    "div",
    {},
    h("p", {}, why),
    h("label", { for: "key" }, "API key"),
    input,
    h("p", { class: "soft" }, "It stays in this tab until the tab is closed, and is sent to this server only."),
  );
  return ask("API key", content, "Use it", "main", () => input.value.trim());
}
