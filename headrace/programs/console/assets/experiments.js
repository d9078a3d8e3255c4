// SPDX-License-Identifier: Apache-2.0
// The experiments of the gateway, and the page of one experiment with its jobs.

import { call, get } from "./api.js";
import { confirmed } from "./dialogs.js";
import { entitle, field, h, note, setText } from "./dom.js";
import { jobList } from "./jobs.js";
import { facts, failed, when } from "./saying.js";
import { may, orgPath } from "./session.js";
import { every, Rows } from "./ticking.js";

const SIZE = 25;
const nameOf = (experiment) => experiment.name || `${experiment.network_arch} ${experiment.id.slice(0, 8)}`;
const pathOf = (id) => `${orgPath("v1")}/experiments/${id}`;

async function remove(experiment) {
  const text = `Delete ${nameOf(experiment)} and the records of its finished jobs? This cannot be undone.`;
  if (!(await confirmed("Delete this experiment", text, "Delete", "danger"))) return false;
  try {
    await call(pathOf(experiment.id), { method: "DELETE" });
    note(`${nameOf(experiment)} is deleted.`);
    return true;
  } catch (error) {
    note(`${nameOf(experiment)} was not deleted: ${error.message}`);
    return false;
  }
}

export function experimentsPage(main, id) {
  return id ? one(main, id) : list(main);
}

function list(main) {
  const search = h("input", { type: "search", id: "search", autocomplete: "off", spellcheck: "false", "aria-keyshortcuts": "/" });
  const [count, problem] = [h("p", { class: "soft", role: "status" }), h("div")];
  const before = h("button", { type: "button", onclick: () => turn(-SIZE) }, "Newer");
  const after = h("button", { type: "button", onclick: () => turn(SIZE) }, "Older");
  const rows = new Rows("Table of experiments", ["Experiment", "Model", "Description", "Created"], cells, "No experiment matches.");
  let skip = 0;
  function cells(each) {
    return [
      h("th", { scope: "row" }, h("a", { href: `#/experiments/${each.id}` }, nameOf(each)), h("div", { class: "soft mono" }, each.id)),
      h("td", {}, each.network_arch),
      h("td", { class: "reason" }, each.description || ""),
      h("td", {}, when(each.created_on)),
    ];
  }
  async function draw() {
    try {
      const all = (await get(`${orgPath("v1")}/experiments`)).experiments;
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const found = all
        .filter((each) => words.every((word) => `${nameOf(each)} ${each.id} ${each.network_arch} ${each.description}`.toLowerCase().includes(word)))
        .sort((first, second) => second.created_on.localeCompare(first.created_on));
      if (skip >= found.length) skip = 0;
      const shown = found.slice(skip, skip + SIZE);
      rows.fill(shown, (each) => each.id);
      setText(count, found.length ? `${skip + 1} to ${skip + shown.length} of ${found.length}` : "none");
      before.disabled = !skip;
      after.disabled = skip + SIZE >= found.length;
      problem.replaceChildren();
    } catch (error) {
      problem.replaceChildren(failed(error.message));
    }
  }
  function turn(by) {
    skip = Math.max(0, skip + by);
    ticks.now();
  }
  search.addEventListener("input", () => turn(-Infinity));
  main.replaceChildren(
    h("h1", {}, "Experiments"),
    h("div", { class: "bar" }, h("div", { class: "grow" }, field("Search (press /)", search))),
    problem,
    h("div", { class: "card" }, rows.element, h("div", { class: "pager" }, count, before, after)),
  );
  const ticks = every(5000, draw);
  return ticks;
}

function one(main, id) {
  const title = h("h1", {}, "Experiment");
  const about = h("div", { class: "card" }, h("p", { class: "soft" }, "Loading."));
  const buttons = h("div", { class: "actions" });
  const jobs = jobList(`${pathOf(id)}/jobs`, true);
  main.replaceChildren(h("div", { class: "head" }, title, buttons), h("div", { class: "stack" }, about, jobs.element));
  get(pathOf(id)).then(
    (told) => {
      setText(title, nameOf(told));
      entitle(nameOf(told));
      about.replaceChildren(facts([["Model", told.network_arch], ["Description", told.description], ["Workspace", told.workspace], ["Created", when(told.created_on)], ["Id", h("span", { class: "mono" }, told.id)]]));
      if (may("experiments.write")) buttons.append(h("button", { type: "button", class: "danger", onclick: async () => (await remove(told)) && (location.hash = "#/experiments") }, "Delete"));
    },
    (error) => about.replaceChildren(failed(error.message)),
  );
  return jobs.leave;
}
