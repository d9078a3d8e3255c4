// SPDX-License-Identifier: Apache-2.0
// Call this server. Paths are relative to the page, so that a proxy may add a path.
// The key is sent in a header, never in a URL.

import { askKey } from "./dialogs.js";

const KEY = "headrace-key";
let asking = null;
let refused = (status, text) => changeKey(text);

export const key = () => sessionStorage.getItem(KEY) || "";
export const setKey = (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY));

export function changeKey(why) {
  // Several calls may be refused at once; ask the user once.
  asking ||= askKey(why).then((value) => {
    if (value !== null) setKey(value);
    asking = null;
    return value !== null;
  });
  return asking;
}

// Replace the handler of 401 and 403, which asks for a key. It gets status and text, and returns whether to retry.
export const whenRefused = (handler) => (refused = handler);

export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

async function explained(response) {
  const text = await response.text();
  try {
    const said = JSON.parse(text);
    const told = said.error_desc || said.error;
    return typeof told === "string" ? told : told.message || text;
  } catch {
    return text || `the server answered ${response.status}`;
  }
}

export async function call(path, { method = "GET", body, headers = {}, signal, quiet = false } = {}) {
  const sent = key();
  const all = { ...headers };
  if (sent) all.authorization = `Bearer ${sent}`;
  if (body !== undefined && !all["content-type"]) all["content-type"] = "application/json";
  const response = await fetch(path, { method, body, headers: all, signal, cache: "no-store", credentials: "omit" });
  if (response.ok) return response;
  const text = await explained(response);
  if ((response.status === 401 || response.status === 403) && !quiet) {
    if (key() !== sent || (await refused(response.status, text))) return call(path, { method, body, headers, signal, quiet });
  }
  throw new Refused(response.status, text);
}

export const get = async (path, options) => (await call(path, options)).json();
export const post = (path, document, options) =>
  call(path, { method: "POST", body: JSON.stringify(document), ...options });

export const modelPath = (name, version) =>
  `v2/models/${encodeURIComponent(name)}${version ? `/versions/${encodeURIComponent(version)}` : ""}`;
