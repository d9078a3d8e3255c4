// SPDX-License-Identifier: Apache-2.0
// The page of one job: state, events, log and actions; and the form that starts a service.

import { askForm } from "./ask.js";
import { call, get, post } from "./api.js";
import { confirmed } from "./dialogs.js";
import { entitle, field, h, note, number, setText } from "./dom.js";
import { FINAL, isService, KINDS, nameOf, startable, statusPill, stoppable, stopService, withParents } from "./jobs.js";
import { facts, failed, pill, when } from "./saying.js";
import { jobPath, may, orgPath, servicePath } from "./session.js";
import { every, logBox, Rows } from "./ticking.js";

const STEPS = ["Starting", "Initializing", "Loading", "Ready"];

// The current step of a starting service, and its error.
function phaseOf(job, status) {
  if (status?.initialization_error) return [1, status.initialization_error];
  if (status?.model_load_error) return [2, status.model_load_error];
  if (job.status === "Error") return [0, job.job_details?.message || "it failed"];
  if (!status || job.status === "Pending" || status.pod_status === "Pending") return [0, ""];
  if (status.model_loaded) return [3, ""];
  return [status.server_initializing ? 1 : 2, ""];
}

function serviceState(job, status) {
  const [at, wrong] = phaseOf(job, status);
  const progress = status?.progress;
  const { done, total, unit } = progress?.details || {};
  const kind = wrong ? "now bad" : at === 3 ? "now good" : "now";
  return h(
    "div",
    {},
    h("ol", { class: "steps", "aria-label": "States" }, STEPS.map((word, place) => h("li", place === at ? { class: kind, "aria-current": "step" } : { class: place < at ? "past" : "" }, word))),
    wrong ? failed(wrong) : h("p", { class: "soft" }, progress?.message || job.job_details?.message || ""),
    !wrong && at < 3 && total ? h("progress", { class: "load", value: done, max: total, "aria-label": `${number(done)} of ${number(total)} ${unit || ""}` }) : null,
  );
}

function factsOf(job, status) {
  return facts([
    ["Pod", status?.pod_status ? h("span", {}, pill(status.pod_status), " ", h("span", { class: "mono" }, status.pod_name)) : null],
    ["Model", job.network_arch],
    ["Kind of model", status?.model_type],
    ["From", job.parent_id ? h("a", { href: `#/jobs/${job.parent_id}` }, job.of || job.parent_id.slice(0, 8)) : null],
    ["Experiment", h("a", { href: `#/experiments/${job.experiment_id}` }, job.experiment_id.slice(0, 8))],
    ["GPUs", job.num_gpu > 0 ? String(job.num_gpu) : null],
    ["Created", when(job.created_on)],
    ["Idle", status?.idle_timeout_minutes ? `${Math.floor(status.idle_time_minutes)} of ${number(status.idle_timeout_minutes)} minutes` : null],
    ["Last request", status?.last_request_time ? when(status.last_request_time) : null],
  ]);
}

// The actions that a job allows in its state: label, style, explanation and function.
function deedsOf(job) {
  if (stoppable(job)) return [["Stop", "danger", "", () => stopService(job)]];
  if (!may("jobs.write")) return [];
  const ask = (verb) => () => post(jobPath(job.id, verb), {});
  const over = FINAL.includes(job.status);
  const made = [];
  if (job.action === "inference") {
    if (["Pending", "Started", "Running"].includes(job.status)) made.push(["Pause", "", "It waits until you resume it; its results are kept.", ask("pause")]);
    if (job.status === "Paused") made.push(["Resume", "main", "It continues where it stopped.", ask("resume")]);
    if (["Error", "Canceled"].includes(job.status)) made.push(["Retry", "main", "A new job computes the missing items.", ask("retry")]);
  }
  if (!over && !isService(job)) made.push(["Cancel", "danger", "It is stopped and cannot be resumed.", ask("cancel")]);
  if (over) made.push(["Delete", "danger", "Its record and its log are removed permanently.", () => call(jobPath(job.id), { method: "DELETE" })]);
  return made;
}

export function jobPage(main, id) {
  const place = h("div", {}, h("p", { class: "soft" }, "Loading."));
  const [title, mark, buttons] = [h("h1", {}, "Job"), h("span"), h("div", { class: "actions" })];
  const [state, asking, problem] = [h("div"), h("div"), h("div")];
  const events = new Rows("Table of events", ["Time", "Status", "Reason", "By"], (each) => [h("td", {}, when(each.time)), h("td", {}, pill(each.status, each.status.toLowerCase())), h("td", { class: "reason" }, each.reason), h("td", { class: "mono" }, each.by)], "No events yet.");
  const log = logBox(async (lines) => (await call(`${jobPath(id, "logs")}?tail=${lines}`)).text());
  let drawn = "";
  main.replaceChildren(h("div", { class: "head" }, title, mark, buttons), problem, place);

  function drawButtons(job) {
    const told = `${job.status} ${startable(job)}`;
    if (drawn === told) return;
    drawn = told;
    const deeds = deedsOf(job).map(([word, kind, text, deed]) => h("button", { type: "button", class: kind, onclick: () => act(job, word, kind, text, deed) }, word));
    const start = startable(job) ? [h("a", { class: "button", href: `#/start/${id}` }, "Start a service")] : [];
    buttons.replaceChildren(...start, ...deeds);
  }

  async function act(job, word, kind, text, deed) {
    // `stopService` asks for confirmation itself.
    if (text && !(await confirmed(`${word} this job`, `${word} ${nameOf(job)}? ${text}`, word, kind || "main"))) return;
    try {
      const answer = await deed();
      if (word === "Retry") location.hash = `#/jobs/${await answer.json()}`;
      if (word === "Delete") {
        note(`${nameOf(job)} is deleted.`);
        location.hash = isService(job) ? "#/services" : "#/jobs";
        return;
      }
    } catch (error) {
      note(`${word}: ${error.message}`);
    }
    ticks.now();
  }

  let shown = "";
  async function look() {
    try {
      const [job] = await withParents([await get(jobPath(id))]);
      const status = isService(job) && !FINAL.includes(job.status) ? await get(servicePath(id, "status")).catch(() => null) : null;
      if (job.last_modified !== shown) events.fill((await get(jobPath(id, "events"))).events.reverse(), (each) => `${each.time} ${each.status}`);
      shown = job.last_modified;
      draw(job, status);
      if (job.action !== "train") await log.look();
      problem.replaceChildren();
    } catch (error) {
      problem.replaceChildren(failed(error.message));
    }
  }

  function draw(job, status) {
    setText(title, nameOf(job));
    entitle(nameOf(job));
    mark.replaceChildren(statusPill(job), " ", h("span", { class: "soft" }, KINDS[job.action] || job.action));
    drawButtons(job);
    const over = FINAL.includes(job.status) && job.status !== "Error";
    const details = job.job_details?.progress ? JSON.stringify(job.job_details.progress) : "";
    const how = isService(job) && !over ? serviceState(job, status) : h("p", {}, job.job_details?.message || "", details && h("span", { class: "soft mono" }, ` ${details}`));
    state.replaceChildren(how, factsOf(job, status));
    const ready = Boolean(status?.model_loaded) && may("services.infer");
    if (ready && !asking.firstChild) asking.append(askForm(job, status));
    if (!ready) asking.replaceChildren();
    if (place.firstChild?.className !== "stack") {
      const card = (name, ...inside) => h("section", { class: "card", "aria-label": name }, h("h2", {}, name), inside);
      place.replaceChildren(h("div", { class: "stack" }, card("State", state), asking, job.action === "train" ? null : log.element, card("Events", events.element)));
    }
  }

  const ticks = every(1000, look);
  return ticks;
}

export function startPage(main, id) {
  const gpus = h("input", { type: "number", min: "0", max: "64", placeholder: "default" });
  const idle = h("input", { type: "number", min: "0", step: "any", placeholder: "default" });
  const variables = h("textarea", { rows: 3, spellcheck: "false", placeholder: "HF_TOKEN=..." });
  const more = h("textarea", { rows: 3, spellcheck: "false", placeholder: '{"dtype": "float32"}' });
  const [what, why] = [h("p", {}, "Loading."), h("div")];
  const button = h("button", { class: "main", disabled: true }, "Start");
  let parent = null;

  async function send(event) {
    event.preventDefault();
    button.disabled = true;
    try {
      const told = await post(`${orgPath("v1")}/experiments/${parent.experiment_id}/inference_microservice/start`, request());
      location.hash = `#/jobs/${(await told.json()).job_id}`;
    } catch (error) {
      why.replaceChildren(failed(error.message));
      button.disabled = false;
    }
  }
  function request() {
    const made = { ...JSON.parse(more.value.trim() || "{}"), parent_id: id };
    if (gpus.value) made.num_gpus = Number(gpus.value);
    if (idle.value) made.idle_timeout_minutes = Number(idle.value);
    const pairs = variables.value.split("\n").map((line) => line.trim()).filter(Boolean).map((line) => line.split(/=(.*)/s));
    if (pairs.length) made.docker_env_vars = Object.fromEntries(pairs.map(([name, value = ""]) => [name, value]));
    return made;
  }

  main.replaceChildren(
    h("h1", {}, "Start a service"),
    h(
      "form",
      { class: "card narrow", onsubmit: send },
      what,
      h("div", { class: "more" }, field("GPUs", gpus), field("Idle minutes until it stops", idle)),
      h("div", { class: "two" }, field("Variables, one per line", variables), field("More settings of the model, as JSON", more)),
      h("div", { class: "row" }, button, h("a", { href: `#/jobs/${id}` }, "Back")),
      why,
    ),
  );
  get(jobPath(id)).then(
    (job) => {
      parent = job;
      button.disabled = !startable(job);
      const told = startable(job) ? "This starts an inference microservice with the model." : "Only an operator or an admin can start a service, and only from a finished trained model.";
      what.replaceChildren(h("strong", {}, nameOf(job)), ` (${job.network_arch || "no architecture"}). ${told}`);
    },
    (error) => what.replaceChildren(failed(error.message)),
  );
}
