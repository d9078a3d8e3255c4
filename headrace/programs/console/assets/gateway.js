// SPDX-License-Identifier: Apache-2.0
// The console of the gateway: its pages, the logged-in user, and whether the gateway answers.

import { get, whenRefused } from "./api.js";
import { auditPage } from "./audit.js";
import { note, setText } from "./dom.js";
import { experimentsPage } from "./experiments.js";
import { frame } from "./frame.js";
import { jobPage, startPage } from "./job.js";
import { jobsPage, servicesPage } from "./jobs.js";
import { forget, loginPage, may, resume, session } from "./session.js";
import { every } from "./ticking.js";

const PAGES = {
  services: servicesPage,
  jobs: (main, id) => (id ? jobPage(main, id) : jobsPage(main)),
  start: startPage,
  experiments: experimentsPage,
  audit: auditPage,
};
const inside = Object.entries(PAGES).map(([name, page]) => [name, (main, rest) => (session() ? page(main, rest) : loginPage(main, enter))]);
const show = frame(Object.fromEntries(inside), "services");

function tellWho() {
  const who = session();
  for (const id of ["sections", "leave-button"]) document.getElementById(id).hidden = !who;
  document.getElementById("audit-link").hidden = !may("audit.read");
  setText(document.getElementById("status"), who ? `${who.user_name}, ${who.role} of ${who.organisation}` : "not logged in");
}

function enter() {
  tellWho();
  show();
  document.getElementById("main").focus();
}

document.getElementById("leave-button").addEventListener("click", () => {
  forget();
  enter();
});
whenRefused((status) => {
  // An expired token means to log in again. A 403 is shown where the action was tried.
  if (status === 401 && session()) {
    forget();
    enter();
    note("You are logged out: the token has expired, or was revoked.");
  }
  return false;
});
await resume();
tellWho();
show();
let away = false;
every(5000, async () => {
  try {
    await get("health/readiness", { quiet: true });
    if (away) tellWho();
    away = false;
  } catch {
    away = true;
    setText(document.getElementById("status"), "the gateway does not answer");
  }
});
