// SPDX-License-Identifier: Apache-2.0
// The session at the gateway: the user, the permissions and the login page. The key is exchanged for a token; only the
// token is kept, in this tab, and sent in a header of each call.

import { get, key, post, setKey } from "./api.js";
import { field, h, setText } from "./dom.js";

const ORGANISATION = "headrace-organisation";
let current = null;

export const session = () => current;
export const may = (operation) => Boolean(current?.may.includes(operation));
export const orgPath = (version) => `api/${version}/orgs/${encodeURIComponent(current.organisation)}`;
export const jobPath = (id, verb = "") => `${orgPath("v2")}/jobs/${id}${verb && `:${verb}`}`;
export const servicePath = (id, verb) => `${orgPath("v2")}/inference_microservices/${id}:${verb}`;

// The token is not revoked: other tabs and programs of the user may have the same one.
export function forget() {
  current = null;
  setKey("");
}

const ask = (organisation) => get(`api/v2/orgs/${encodeURIComponent(organisation)}/session`, { quiet: true });

// Stay logged in when the tab is reloaded.
export async function resume() {
  const organisation = sessionStorage.getItem(ORGANISATION);
  if (!organisation || !key()) return;
  try {
    current = await ask(organisation);
  } catch {
    forget();
  }
}

async function logIn(organisation, secret) {
  setKey("");
  const told = await (await post("api/v2/login", { ngc_key: secret, ngc_org_name: organisation }, { quiet: true })).json();
  setKey(told.token);
  try {
    current = await ask(organisation);
  } catch (error) {
    forget();
    throw error;
  }
  sessionStorage.setItem(ORGANISATION, organisation);
}

export function loginPage(main, entered) {
  const organisation = h("input", { autocomplete: "organization", spellcheck: "false", required: true, value: sessionStorage.getItem(ORGANISATION) || "" });
  const secret = h("input", { type: "password", autocomplete: "off", spellcheck: "false", required: true });
  const button = h("button", { class: "main" }, "Log in");
  const why = h("p", { class: "failed", role: "alert", hidden: true });
  async function send(event) {
    event.preventDefault();
    button.disabled = true;
    why.hidden = true;
    try {
      await logIn(organisation.value.trim(), secret.value.trim());
      entered();
    } catch (error) {
      setText(why, error.message);
      why.hidden = false;
      secret.select();
      secret.focus();
    } finally {
      button.disabled = false;
    }
  }
  main.replaceChildren(
    h(
      "form",
      { class: "card login", onsubmit: send },
      h("h1", {}, "Log in"),
      field("Organisation", organisation),
      field("Key", secret),
      button,
      why,
      h("p", { class: "soft" }, "Enter the key that `headrace users add` printed. It is sent to this gateway once, in exchange for a token that this tab keeps until it is closed."),
    ),
  );
  (organisation.value ? secret : organisation).focus();
}
