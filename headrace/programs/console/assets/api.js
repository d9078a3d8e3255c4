// SPDX-License-Identifier: Apache-2.0
// Call this server, and poll its live data. Paths are relative to the page, so that a proxy may add a path.
// The key is sent in a header, never in a URL.

import { askKey } from "./components.js";

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
export const onRefused = (handler) => (refused = handler);

export class CallError extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }

  get needsKey() {
    return this.status === 401 || this.status === 403;
  }
}

async function errorText(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    const error = body.error_desc || body.error;
    return typeof error === "string" ? error : error.message || text;
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
  const text = await errorText(response);
  if ((response.status === 401 || response.status === 403) && !quiet) {
    if (key() !== sent || (await refused(response.status, text))) return call(path, { method, body, headers, signal, quiet });
  }
  throw new CallError(response.status, text);
}

export const get = async (path, options) => (await call(path, options)).json();
export const post = (path, document, options) => call(path, { method: "POST", body: JSON.stringify(document), ...options });

export const modelPath = (name, version) => `v2/models/${encodeURIComponent(name)}${version ? `/versions/${encodeURIComponent(version)}` : ""}`;

// The live data of a server, once a second while the tab is visible.
const listeners = new Set();
let newest = null;
let timer = 0;
let waitsForKey = false;

export const latest = () => newest;
export const models = () => newest?.models || [];
export const rates = (name) => newest?.rates[name] || null;

export const isLanguage = (name) => models().some((model) => model.name === name && model.numbers?.llm);

export function readyNames() {
  return [...new Set(models().filter((model) => model.state === "READY").map((model) => model.name))].sort();
}

// Call `listener(error or null)` after each poll; returns a function that ends it.
export function listen(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export async function refresh() {
  clearTimeout(timer);
  let wait = 1000;
  try {
    newest = await get("console/api/live", { quiet: waitsForKey });
    waitsForKey = false;
    for (const listener of listeners) listener(null);
  } catch (error) {
    // Do not ask for a key again and again: there is a button for it.
    waitsForKey = Boolean(error.needsKey);
    wait = waitsForKey ? 5000 : 2000;
    for (const listener of listeners) listener(error);
  }
  clearTimeout(timer);
  timer = setTimeout(() => (document.hidden ? document.addEventListener("visibilitychange", refresh, { once: true }) : refresh()), wait);
}
