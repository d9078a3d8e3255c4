// SPDX-License-Identifier: Apache-2.0
// Lists of services or of all jobs, with search and paging. The page of one job is in job.js.

import { get, post } from "./api.js";
import { confirmed } from "./dialogs.js";
import { field, h, note, select, setText } from "./dom.js";
import { failed, pill, when } from "./saying.js";
import { jobPath, may, orgPath, servicePath } from "./session.js";
import { every, Rows } from "./ticking.js";

const SIZE = 25;
const SEARCHED = 2000;
export const KINDS = { inference_microservice: "service", train: "trained model", inference: "batch" };
export const FINAL = ["Done", "Error", "Canceled"];
const STATUSES = ["Pending", "Running", "Done", "Error", "Canceling", "Canceled", "Paused"];

export const nameOf = (job) => job.name || `${job.of || job.network_arch || KINDS[job.action] || job.action} ${job.id.slice(0, 8)}`;
export const isService = (job) => job.action === "inference_microservice";
// A service that is Done was stopped, so it is not shown as a success.
export const statusPill = (job) => pill(job.status, job.status.toLowerCase(), job.status === "Done" && !isService(job) ? "READY" : undefined);
export const startable = (job) => job.action === "train" && job.status === "Done" && may("services.start");
export const stoppable = (job) => isService(job) && !FINAL.includes(job.status) && may("services.stop");

// Add `of` to jobs: the name of the job whose model they serve. It never changes, so each is requested once.
const parents = new Map();
export async function withParents(jobs) {
  const missing = [...new Set(jobs.map((job) => job.parent_id).filter((id) => id && !parents.has(id)))];
  const look = async (id) => parents.set(id, await get(jobPath(id), { quiet: true }).then(nameOf, () => ""));
  await Promise.all(missing.map(look));
  return jobs.map((job) => ({ ...job, of: parents.get(job.parent_id) || "" }));
}

export async function stopService(job) {
  const text = `Stop ${nameOf(job)}? Further requests for it are refused. You can start another service from the same model.`;
  if (!(await confirmed("Stop this service", text, "Stop", "danger"))) return false;
  try {
    await post(servicePath(job.id, "stop"), {});
    note(`${nameOf(job)} is stopped.`);
  } catch (error) {
    note(`${nameOf(job)} was not stopped: ${error.message}`);
  }
  return true;
}

// `all`: whether to show jobs of every kind.
export function jobList(path, all) {
  const search = h("input", { type: "search", id: "search", autocomplete: "off", spellcheck: "false", "aria-keyshortcuts": "/" });
  const kind = select([["", "all"], ...Object.entries(KINDS).map(([value, text]) => [value, text])], all ? "" : "inference_microservice", again);
  const status = select([["", "all"], ...STATUSES.map((each) => [each, each.toLowerCase()])], "", again);
  const count = h("p", { class: "soft", role: "status" });
  const before = h("button", { type: "button", onclick: () => turn(-SIZE) }, "Newer");
  const after = h("button", { type: "button", onclick: () => turn(SIZE) }, "Older");
  const problem = h("div");
  let skip = 0;

  const columns = ["Job", ...(all ? ["Kind"] : []), "Model", "Status", "Created", "Actions"];
  const rows = new Rows("Table of jobs", columns, cells, all ? "No job matches." : "No service matches. To start one, choose a trained model under Jobs.");
  function cells(job) {
    const start = startable(job) ? h("a", { href: `#/start/${job.id}`, class: "button", "aria-label": `Start a service of ${nameOf(job)}` }, "Start a service") : null;
    const stop = stoppable(job) ? h("button", { type: "button", class: "danger", "aria-label": `Stop ${nameOf(job)}`, onclick: async () => (await stopService(job)) && ticks.now() }, "Stop") : null;
    return [
      h("th", { scope: "row" }, h("a", { href: `#/jobs/${job.id}` }, nameOf(job)), h("div", { class: "soft mono" }, job.id)),
      ...(all ? [h("td", {}, KINDS[job.action] || job.action)] : []),
      h("td", {}, job.of || job.network_arch || "–", job.of ? h("div", { class: "soft" }, job.network_arch) : null),
      h("td", { class: "reason" }, statusPill(job), h("div", { class: "soft" }, job.job_details?.message || "")),
      h("td", {}, when(job.created_on)),
      h("td", {}, h("div", { class: "actions" }, start, stop)),
    ];
  }

  async function found() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const query = new URLSearchParams(words.length ? { size: SEARCHED } : { skip, size: SIZE });
    if (kind.value) query.set("action", kind.value);
    if (status.value) query.set("status", status.value);
    const told = await get(`${path}?${query}`);
    const total = told.pagination_info.total_records;
    if (!words.length) return [told.jobs, total, ""];
    const fits = (job) => words.every((word) => `${nameOf(job)} ${parents.get(job.parent_id)} ${job.id} ${job.network_arch} ${job.status} ${job.description} ${job.job_details?.message}`.toLowerCase().includes(word));
    const fitting = told.jobs.filter(fits);
    return [fitting.slice(skip, skip + SIZE), fitting.length, total > SEARCHED ? `, of the newest ${SEARCHED}` : ""];
  }

  async function draw() {
    try {
      const [jobs, total, of] = await found();
      if (skip && skip >= total) {
        skip = 0;
        return draw();
      }
      rows.fill(await withParents(jobs), (job) => job.id);
      setText(count, total ? `${skip + 1} to ${skip + jobs.length} of ${total}${of}` : "none");
      before.disabled = !skip;
      after.disabled = skip + SIZE >= total;
      problem.replaceChildren();
    } catch (error) {
      problem.replaceChildren(failed(error.message));
    }
  }
  function again() {
    skip = 0;
    ticks.now();
  }
  function turn(by) {
    skip = Math.max(0, skip + by);
    ticks.now();
  }
  search.addEventListener("input", again);
  const bar = h("div", { class: "bar" }, h("div", { class: "grow" }, field("Search (press /)", search)), all ? field("Kind", kind) : null, field("Status", status));
  const element = h("div", {}, bar, problem, h("div", { class: "card" }, rows.element, h("div", { class: "pager" }, count, before, after)));
  const ticks = every(2000, draw);
  return { element, leave: ticks };
}

function page(title, all) {
  return (main) => {
    const list = jobList(`${orgPath("v2")}/jobs`, all);
    main.replaceChildren(h("h1", {}, title), list.element);
    return list.leave;
  };
}

export const servicesPage = page("Services", false);
export const jobsPage = page("Jobs", true);
