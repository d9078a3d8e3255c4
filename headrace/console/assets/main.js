// SPDX-License-Identifier: Apache-2.0
// The frame: which page is shown, colours, the key, and how the server is.

import { changeKey, get } from "./api.js";
import { number, setText } from "./dom.js";
import { livePage } from "./live.js";
import { modelsPage } from "./models.js";
import { tryPage } from "./play.js";
import { requestsPage } from "./requests.js";
import { history, latest, listen, look, step } from "./store.js";
import { trafficPage } from "./traffic.js";

const PAGES = { models: modelsPage, live: livePage, requests: requestsPage, try: tryPage, traffic: trafficPage };
const THEMES = { auto: ["Auto", "as the system"], light: ["Light", "light"], dark: ["Dark", "dark"] };
const main = document.getElementById("main");
let leave = null;

function show() {
  const [, name = "models", ...rest] = location.hash.split("/");
  const page = PAGES[name] ? name : "models";
  leave?.();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#/${page}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  leave = PAGES[page](main, rest.join("/")) || null;
  document.title = `${main.querySelector("h1").textContent} – Headrace console`;
}

function theme(name) {
  const button = document.getElementById("theme-button");
  document.documentElement.dataset.theme = name;
  localStorage.setItem("headrace-theme", name);
  setText(button, THEMES[name][0]);
  button.setAttribute("aria-label", `Colours: ${THEMES[name][1]}`);
}

function tellStatus(error) {
  const status = document.getElementById("status");
  if (error) {
    setText(status, error.status === 401 || error.status === 403 ? "an API key is needed" : "the server does not answer");
    return;
  }
  const now = latest();
  const before = history[history.length - 2];
  const rate = before ? `, ${number(step(before, now, "").requests)} requests/s` : "";
  setText(status, `${now.ready ? "ready" : "not ready"}${rate}`);
}

window.addEventListener("hashchange", () => {
  show();
  main.focus();
});
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
document.getElementById("theme-button").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  theme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
});
document.getElementById("key-button").addEventListener("click", async () => {
  if (await changeKey("Send this key with every call. Leave it empty to send none.")) look();
});
document.addEventListener("keydown", (event) => {
  const field = document.getElementById("search");
  if (event.key === "/" && field && !/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) {
    event.preventDefault();
    field.focus();
  }
});

const kept = localStorage.getItem("headrace-theme");
theme(THEMES[kept] ? kept : "auto");
listen(tellStatus);
await look();
show();
if (document.activeElement === document.body) main.focus({ preventScroll: true });
get("admin/traffic", { quiet: true })
  .then((told) => (document.getElementById("traffic-link").hidden = !told.splits.length))
  .catch(() => {});
