// SPDX-License-Identifier: Apache-2.0
// Dialogs: ask for a key, or confirm an action.

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

// `content`: a text, or form elements.
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
    h("p", { class: "soft" }, "The key is kept in this tab until it is closed, and is sent to this server only."),
  );
  return ask("API key", content, "Use it", "main", () => input.value.trim());
}
