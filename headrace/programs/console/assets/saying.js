// SPDX-License-Identifier: Apache-2.0
// Format states and times, and small elements that the pages of the gateway and the fleet share.

import { h, s } from "./dom.js";

const TONES = {
  READY: ["Running", "Loaded", "True", "ready", "allowed", "Normal"],
  LOADING: ["Pending", "Started", "Canceling", "Pausing", "Resuming", "Loading", "Terminating", "Unknown", "waiting", "deleting", "Warning"],
  UNAVAILABLE: ["Error", "Failed", "FailedToLoad", "False", "invalid", "failing", "denied", "failed"],
};
const tone = (word) => Object.keys(TONES).find((each) => TONES[each].includes(word)) || "";

export const pill = (word, text = word, kind = tone(word)) => h("span", { class: `state ${kind}` }, text);

export function when(text) {
  const time = new Date(text);
  if (!text || Number.isNaN(time.getTime())) return "–";
  const two = (value) => String(value).padStart(2, "0");
  const clock = `${two(time.getHours())}:${two(time.getMinutes())}:${two(time.getSeconds())}`;
  const day = `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())}`;
  const today = time.toDateString() === new Date().toDateString();
  return h("time", { datetime: text, title: `${day} ${clock}`, class: "nowrap" }, today ? clock : `${day} ${clock.slice(0, 5)}`);
}

// A list of names and values; empty values are left out.
export const facts = (pairs) =>
  h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));

// The traffic shares of revisions as one bar, with the newest marked.
export function splitBar(shares) {
  let at = 0;
  const parts = shares.map((share) => {
    const part = s("rect", { x: at, y: 0, width: share.percent, height: 10, class: share.latest ? "newest" : "before" });
    at += share.percent;
    return part;
  });
  const told = shares.map((share) => `${share.percent} % ${share.latest ? "newest" : "before"}${share.revision ? ` (${share.revision})` : ""}`);
  return h(
    "div",
    { class: "split" },
    s("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": `Requests: ${told.join(", ")}` }, parts),
    h("ul", { class: "legend" }, shares.map((share, place) => h("li", {}, s("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, s("rect", { width: 10, height: 10, class: share.latest ? "newest" : "before" })), told[place]))),
  );
}

export const failed = (text) => h("p", { class: "failed", role: "alert" }, text);
