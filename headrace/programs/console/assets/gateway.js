// SPDX-License-Identifier: Apache-2.0
// The console of the gateway: login, services and jobs, experiments, and the audit log.

import { call, get, key, onRefused, post, setKey } from "./api.js";
import { badge, button, byId, card, confirmed, div, errorBox, facts, field, fileAsUrl, h, link, logBox, matches, missing, note, number, onSubmit, poll, pollShown, region, runConfirmed, searchField, searchInput, select, setText, setTitle, showError, soft, span, startPages, statusLine, Table, td, th, when, wordsOf } from "./components.js";

// The session: the user, the permissions and the login page. The key is exchanged for a token; only the token is kept, in
// this tab, and sent in a header of each call.

const ORGANISATION = "headrace-organisation";
let current = null;

const may = (operation) => Boolean(current?.may.includes(operation));
const orgPath = (version) => `api/${version}/orgs/${encodeURIComponent(current.organisation)}`;
const jobPath = (id, verb = "") => `${orgPath("v2")}/jobs/${id}${verb && `:${verb}`}`;
const servicePath = (id, verb) => `${orgPath("v2")}/inference_microservices/${id}:${verb}`;

// The token is not revoked: other tabs and programs may have it.
function forget() {
  current = null;
  setKey("");
}

const readSession = (organisation) => get(`api/v2/orgs/${encodeURIComponent(organisation)}/session`, { quiet: true });

// Stay logged in when the tab is reloaded.
async function resume() {
  const organisation = sessionStorage.getItem(ORGANISATION);
  if (!organisation || !key()) return;
  try {
    current = await readSession(organisation);
  } catch {
    forget();
  }
}

async function logIn(organisation, secret) {
  setKey("");
  const told = await (await post("api/v2/login", { ngc_key: secret, ngc_org_name: organisation }, { quiet: true })).json();
  setKey(told.token);
  try {
    current = await readSession(organisation);
  } catch (error) {
    forget();
    throw error;
  }
  sessionStorage.setItem(ORGANISATION, organisation);
}

function loginPage(main, entered) {
  const organisation = h("input", { autocomplete: "organization", autocapitalize: "none", spellcheck: "false", required: true, value: sessionStorage.getItem(ORGANISATION) || "" });
  const secret = h("input", { type: "password", autocomplete: "off", spellcheck: "false", required: true });
  const [send, why] = [h("button", { class: "main" }, "Log in"), div("")];
  const submit = onSubmit(send, why, async () => {
    why.replaceChildren();
    secret.select();
    secret.focus();
    await logIn(organisation.value.trim(), secret.value.trim());
    entered();
  });
  main.replaceChildren(
    h(
      "form",
      { class: "card login", onsubmit: submit },
      h("h1", {}, "Log in"),
      field("Organisation", organisation),
      field("Key", secret),
      send,
      why,
      soft(["Enter the key that ", h("code", {}, "headrace users add"), " printed. It is sent to this gateway once, in exchange for a token that this tab keeps until it is closed."]),
    ),
  );
  (organisation.value ? secret : organisation).focus();
}

// Lists of services or of all jobs, with search and paging.

const SIZE = 25;
const SEARCHED = 2000;
const KINDS = { inference_microservice: "service", train: "trained model", inference: "batch" };
const FINAL = ["Done", "Error", "Canceled"];
const STATUSES = ["Pending", "Running", "Done", "Error", "Canceling", "Canceled", "Paused"];

const nameOf = (job) => job.name || `${job.of || job.network_arch || KINDS[job.action] || job.action} ${job.id.slice(0, 8)}`;
const isService = (job) => job.action === "inference_microservice";
// A service that is Done was stopped, so it is not shown as a success.
const statusPill = (job) => badge(job.status, job.status.toLowerCase(), job.status === "Done" && !isService(job) ? "good" : undefined);
const startable = (job) => job.action === "train" && job.status === "Done" && may("services.start");
const stoppable = (job) => isService(job) && !FINAL.includes(job.status) && may("services.stop");

// Add `of` to jobs: the job whose model they serve. It never changes, so each is requested once.
const parents = new Map();
async function withParents(jobs) {
  const unknown = [...new Set(jobs.map((job) => job.parent_id).filter((id) => id && !parents.has(id)))];
  const look = async (id) => parents.set(id, await get(jobPath(id), { quiet: true }).then(nameOf, () => ""));
  await Promise.all(unknown.map(look));
  return jobs.map((job) => ({ ...job, of: parents.get(job.parent_id) || "" }));
}

function stopService(job) {
  const text = `Stop ${nameOf(job)}? Further requests for it are refused. You can start another service from the same model.`;
  return runConfirmed(["Stop this service", text, "Stop", "danger"], nameOf(job), "stopped", () => post(servicePath(job.id, "stop"), {}));
}

// A list with search. `load(words, skip)`: the rows of a page, their number in all, and a text about them.
// `fields(again)`: more fields of the form, which call `again` when they change.
function searchedList(label, columns, cells, empty, interval, load, fields = () => [], keyOf = (each) => each.id) {
  const search = searchInput(again);
  const [count, problem] = [statusLine(), div("")];
  const [before, after] = [button("Newer", () => turn(-SIZE)), button("Older", () => turn(SIZE))];
  const rows = new Table(label, columns, (each) => cells(each, () => ticks.now()), empty);
  let skip = 0;
  async function draw() {
    const [items, total, text = ""] = await load(wordsOf(search.value), skip);
    if (skip && skip >= total) {
      skip = 0;
      return draw();
    }
    rows.fill(items, keyOf);
    setText(count, total ? `${skip + 1} to ${skip + items.length} of ${total}${text}` : "");
    before.disabled = !skip;
    after.disabled = skip + items.length >= total;
    before.hidden = after.hidden = before.disabled && after.disabled;
  }
  function turn(by) {
    skip = Math.max(0, skip + by);
    ticks.now();
  }
  function again() {
    turn(-skip);
  }
  const element = div("", div("bar", searchField(search), fields(again)), problem, div("card flush", rows.element, div("pager", count, before, after)));
  const ticks = pollShown(interval, problem, draw);
  return { element, leave: ticks };
}

function jobCells(job, again, all) {
  const start = startable(job) ? link(`#/start/${job.id}`, "Start a service", { class: "button", "aria-label": `Start a service of ${nameOf(job)}` }) : null;
  const stop = stoppable(job) ? button("Stop", async () => (await stopService(job)) && again(), "danger", { "aria-label": `Stop ${nameOf(job)}` }) : null;
  return [
    th(link(`#/jobs/${job.id}`, nameOf(job)), div("soft mono", job.id)),
    ...(all ? [td("", KINDS[job.action] || job.action)] : []),
    td("", job.of || job.network_arch || "–", job.of ? div("soft", job.network_arch) : null),
    td("reason", statusPill(job), div("soft", job.job_details?.message || "")),
    td("", when(job.created_on)),
    td("actions-cell", div("actions", start, stop)),
  ];
}

// `all`: whether to show jobs of every kind.
function jobList(path, all) {
  const filters = { action: all ? "" : "inference_microservice", status: "" };
  const fields = (again) => {
    const choice = (name, options) => select([["", "All"], ...options], filters[name], (value) => ((filters[name] = value), again()));
    return [all ? field("Kind", choice("action", Object.entries(KINDS))) : null, field("Status", choice("status", STATUSES.map((each) => [each, each.toLowerCase()])))];
  };
  async function load(words, skip) {
    const wanted = Object.entries(filters).filter(([, value]) => value);
    const query = new URLSearchParams([...Object.entries(words.length ? { size: SEARCHED } : { skip, size: SIZE }), ...wanted]);
    const told = await get(`${path}?${query}`);
    const total = told.pagination_info.total_records;
    if (!words.length) return [await withParents(told.jobs), total];
    const fitting = told.jobs.filter((job) => matches(words, nameOf(job), parents.get(job.parent_id), job.id, job.network_arch, job.status, job.description, job.job_details?.message));
    return [await withParents(fitting.slice(skip, skip + SIZE)), fitting.length, total > SEARCHED ? `, of the newest ${SEARCHED}` : ""];
  }
  const columns = ["Job", ...(all ? ["Kind"] : []), "Model", "Status", "Created", "Actions"];
  const empty = all ? "No job matches." : "No service matches. To start one, choose a trained model under Jobs.";
  return searchedList("Table of jobs", columns, (job, again) => jobCells(job, again, all), empty, 2000, load, fields);
}

function listPage(title, all) {
  return (main) => {
    const list = jobList(`${orgPath("v2")}/jobs`, all);
    main.replaceChildren(h("h1", {}, title), list.element);
    return list.leave;
  };
}

// A form that sends a request to a service: from its declared parameters, or with a prompt, media and JSON.

const MEDIA_NAMES = ["images", "media", "videos"];
const PROMPTS = ["prompt", "input", "text"];
const ANY = [{ name: "prompt", type: "text" }, { name: "media", type: "texts" }];

// A form control and a function that returns its value; undefined for the service's default.
function control({ name, type, default: usual, least, most, choices }) {
  if (choices || type === "truth") {
    const words = choices || ["true", "false"];
    const made = h("select", {}, h("option", { value: "" }, usual === null ? "–" : `default (${usual})`), words.map((word) => h("option", { value: word }, word)));
    return [made, () => (made.value === "" ? undefined : type === "truth" ? made.value === "true" : made.value)];
  }
  if (type === "integer" || type === "number") {
    const made = h("input", { type: "number", min: least, max: most, step: type === "integer" ? 1 : "any", placeholder: missing(usual) ? "" : usual });
    return [made, () => (made.value === "" ? undefined : Number(made.value))];
  }
  if (type === "object" || type === "any") {
    const made = h("textarea", { rows: 3, spellcheck: "false", placeholder: "JSON" });
    return [made, () => (made.value.trim() ? parseJson(name, made.value) : undefined)];
  }
  const made = h("input", { autocomplete: "off", placeholder: missing(usual) ? "" : usual });
  return [made, () => made.value || undefined];
}

function parseJson(name, text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Error(`${name} is not JSON`);
  }
}

function askForm(job, status) {
  const declared = status.parameters?.length ? status.parameters : ANY;
  const names = declared.map((each) => each.name);
  const media = MEDIA_NAMES.filter((name) => names.includes(name));
  const prompt = names.find((name) => PROMPTS.includes(name));
  const others = declared.filter((each) => !media.includes(each.name) && each.name !== prompt).map((each) => [each.name, ...control(each)]);
  const text = h("textarea", { rows: 3 });
  const files = h("input", { type: "file", multiple: true, accept: "image/*,video/*" });
  const thumbs = div("thumbs");
  const more = h("textarea", { rows: 2, spellcheck: "false", placeholder: '{"temperature": 0}' });
  const send = h("button", { class: "main" }, "Send");
  const result = h("div", { class: "result", role: "status" });

  const small = others.filter(([, element]) => element.tagName !== "TEXTAREA");
  const large = others.filter(([, element]) => element.tagName === "TEXTAREA");
  files.addEventListener("change", async () => {
    const pictures = [...files.files].filter((file) => file.type.startsWith("image/"));
    thumbs.replaceChildren(...(await Promise.all(pictures.map(async (file) => h("img", { src: await fileAsUrl(file), alt: file.name })))));
  });

  async function request() {
    const made = {};
    for (const [name, , value] of others) if (value() !== undefined) made[name] = value();
    if (prompt && text.value) made[prompt] = text.value;
    for (const file of files.files) {
      const wanted = file.type.startsWith("video/") ? "videos" : "images";
      const name = media.includes(wanted) ? wanted : media[0];
      (made[name] ||= []).push(await fileAsUrl(file));
    }
    return { ...made, ...(more.value.trim() ? parseJson("More fields", more.value) : {}) };
  }

  const submit = onSubmit(send, result, async () => {
    result.replaceChildren(soft("Sent."));
    const before = performance.now();
    const path = `${experimentPath(job.experiment_id)}/jobs/${job.id}/inference_microservice/inference`;
    const told = await (await post(path, await request())).json();
    const answer = told.results?.response;
    result.replaceChildren(
      soft(`${told.status || "answered"} after ${number(performance.now() - before)} ms`),
      ...(typeof answer === "string" ? [h("p", { class: "said" }, answer)] : []),
      h("details", { open: typeof answer !== "string" }, h("summary", {}, "Full answer"), region("pre", "Answer", {}, JSON.stringify(told, null, 2))),
    );
  });

  return card(
    "Request",
    div(
      "two",
      h(
        "form",
        { onsubmit: submit },
        prompt ? field("Prompt", text) : null,
        media.length ? div("row", field("Images or videos", files), thumbs) : null,
        div("more", small.map(([name, element]) => field(name, element))),
        large.map(([name, element]) => field(name, element)),
        declared === ANY ? field("More fields (JSON)", more) : null,
        div("row", send),
      ),
      result,
    ),
  );
}

// The page of one job: state, events, log and actions; and the form that starts a service.

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
    wrong ? errorBox(wrong) : soft(progress?.message || job.job_details?.message || ""),
    !wrong && at < 3 && total ? h("progress", { class: "load", value: done, max: total, "aria-label": `${number(done)} of ${number(total)} ${unit || ""}` }) : null,
  );
}

function factsOf(job, status) {
  return facts([
    ["Pod", status?.pod_status ? h("span", {}, badge(status.pod_status), " ", span("mono", status.pod_name)) : null],
    ["Model", job.network_arch],
    ["Kind of model", status?.model_type],
    ["From", job.parent_id ? link(`#/jobs/${job.parent_id}`, job.of || job.parent_id.slice(0, 8)) : null],
    ["Experiment", link(`#/experiments/${job.experiment_id}`, job.experiment_id.slice(0, 8))],
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

function jobPage(main, id) {
  const place = div("", soft("Loading."));
  const [title, mark, buttons] = [h("h1", {}, "Job"), h("span"), div("actions")];
  const [state, asking, problem] = [div(""), div(""), div("")];
  const events = new Table("Table of events", ["Time", "Status", "Reason", "By"], (each) => [td("", when(each.time)), td("", badge(each.status, each.status.toLowerCase())), td("reason", each.reason), td("mono", each.by)], "No events yet.");
  const log = logBox(async (lines) => (await call(`${jobPath(id, "logs")}?tail=${lines}`)).text());
  let drawn = "";
  main.replaceChildren(div("head", title, mark, buttons), problem, place);

  function drawButtons(job) {
    const told = `${job.status} ${startable(job)}`;
    if (drawn === told) return;
    drawn = told;
    const deeds = deedsOf(job).map(([word, kind, text, deed]) => button(word, () => act(job, word, kind, text, deed), kind));
    if (startable(job)) deeds.unshift(link(`#/start/${id}`, "Start a service", { class: "button" }));
    buttons.replaceChildren(...deeds);
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
    const [job] = await withParents([await get(jobPath(id))]);
    const status = isService(job) && !FINAL.includes(job.status) ? await get(servicePath(id, "status")).catch(() => null) : null;
    if (job.last_modified !== shown) events.fill((await get(jobPath(id, "events"))).events.reverse(), (each) => `${each.time} ${each.status}`);
    shown = job.last_modified;
    draw(job, status);
    if (job.action !== "train") await log.look();
  }

  function draw(job, status) {
    setText(title, nameOf(job));
    setTitle(nameOf(job));
    mark.replaceChildren(statusPill(job), " ", span("soft", KINDS[job.action] || job.action));
    drawButtons(job);
    const over = FINAL.includes(job.status) && job.status !== "Error";
    const details = job.job_details?.progress ? JSON.stringify(job.job_details.progress) : "";
    const how = isService(job) && !over ? serviceState(job, status) : h("p", {}, job.job_details?.message || "", details && span("soft mono", ` ${details}`));
    state.replaceChildren(how, factsOf(job, status));
    const ready = Boolean(status?.model_loaded) && may("services.infer");
    if (ready && !asking.firstChild) asking.append(askForm(job, status));
    if (!ready) asking.replaceChildren();
    if (place.firstChild?.className !== "stack") {
      place.replaceChildren(div("stack", card("State", state), asking, job.action === "train" ? null : log.element, card("Events", events.element)));
    }
  }

  const ticks = pollShown(1000, problem, look);
  return ticks;
}

function startPage(main, id) {
  const gpus = h("input", { type: "number", min: "0", max: "64", placeholder: "default" });
  const idle = h("input", { type: "number", min: "0", step: "any", placeholder: "default" });
  const variables = h("textarea", { rows: 3, spellcheck: "false", placeholder: "HF_TOKEN=..." });
  const more = h("textarea", { rows: 3, spellcheck: "false", placeholder: '{"dtype": "float32"}' });
  const [what, why] = [h("p", {}, "Loading."), div("")];
  const send = h("button", { class: "main", disabled: true }, "Start");
  let parent = null;

  const submit = onSubmit(send, why, async () => {
    const told = await post(`${experimentPath(parent.experiment_id)}/inference_microservice/start`, request());
    location.hash = `#/jobs/${(await told.json()).job_id}`;
  });
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
      { class: "card narrow", onsubmit: submit },
      what,
      div("more", field("GPUs", gpus), field("Idle minutes until it stops", idle)),
      div("two", field("Variables, one per line", variables), field("More settings of the model, as JSON", more)),
      div("row", send, link(`#/jobs/${id}`, "Back")),
      why,
    ),
  );
  showError(what, async () => {
    parent = await get(jobPath(id));
    send.disabled = !startable(parent);
    const told = startable(parent) ? "This starts an inference microservice with the model." : "Only an operator or an admin can start a service, and only from a finished trained model.";
    what.replaceChildren(h("strong", {}, nameOf(parent)), ` (${parent.network_arch || "no architecture"}). ${told}`);
  });
}

// Experiments.

const experimentName = (experiment) => experiment.name || `${experiment.network_arch} ${experiment.id.slice(0, 8)}`;
const experimentPath = (id) => `${orgPath("v1")}/experiments/${id}`;

function removeExperiment(experiment) {
  const text = `Delete ${experimentName(experiment)} and the records of its finished jobs? This cannot be undone.`;
  return runConfirmed(["Delete this experiment", text, "Delete", "danger"], experimentName(experiment), "deleted", async () => {
    await call(experimentPath(experiment.id), { method: "DELETE" });
    location.hash = "#/experiments";
  });
}

const experimentCells = (each) => [th(link(`#/experiments/${each.id}`, experimentName(each)), div("soft mono", each.id)), td("", each.network_arch), td("reason", each.description || ""), td("", when(each.created_on))];

function experimentList(main) {
  const list = searchedList("Table of experiments", ["Experiment", "Model", "Description", "Created"], experimentCells, "No experiment matches.", 5000, async (words, skip) => {
    const { experiments } = await get(`${orgPath("v1")}/experiments`);
    const found = experiments.filter((each) => matches(words, experimentName(each), each.id, each.network_arch, each.description)).sort((first, second) => second.created_on.localeCompare(first.created_on));
    return [found.slice(skip, skip + SIZE), found.length];
  });
  main.replaceChildren(h("h1", {}, "Experiments"), list.element);
  return list.leave;
}

function experimentPage(main, id) {
  const title = h("h1", {}, "Experiment");
  const about = div("card", soft("Loading."));
  const buttons = div("actions");
  const jobs = jobList(`${experimentPath(id)}/jobs`, true);
  main.replaceChildren(div("head", title, buttons), div("stack", about, jobs.element));
  showError(about, async () => {
    const told = await get(experimentPath(id));
    setText(title, experimentName(told));
    setTitle(experimentName(told));
    about.replaceChildren(facts([["Model", told.network_arch], ["Description", told.description], ["Workspace", told.workspace], ["Created", when(told.created_on)], ["Id", span("mono", told.id)]]));
    if (may("experiments.write")) buttons.append(button("Delete", () => removeExperiment(told), "danger"));
  });
  return jobs.leave;
}

// The audit log of an organisation, for its admins.

const auditCells = (each) => [td("", when(each.time)), td("", each.user || "–"), td("", each.operation), td("", badge(each.outcome)), td("mono", each.target || ""), td("mono nowrap", each.address), td("reason", each.reason || "")];

function auditPage(main) {
  let lines = "100";
  const fields = (again) => [field("Lines", select(["100", "500", "1000"].map((each) => [each, each]), lines, (value) => ((lines = value), again())))];
  const load = async (words) => {
    const { events } = await get(`${orgPath("v2")}/audit?size=${lines}`);
    const found = events.filter((each) => matches(words, ...Object.values(each)));
    return [found, found.length, `, in the newest ${events.length}`];
  };
  const list = searchedList("Table of the audit log", ["Time", "User", "Operation", "Outcome", "Target", "Address", "Reason"], auditCells, "No entry matches.", 5000, load, fields, (each, place) => place);
  main.replaceChildren(h("h1", {}, "Audit log"), list.element);
  return list.leave;
}

// The pages, and whether the gateway answers.

const PAGES = {
  services: listPage("Services", false),
  jobs: (main, id) => (id ? jobPage : listPage("Jobs", true))(main, id),
  start: startPage,
  experiments: (main, id) => (id ? experimentPage : experimentList)(main, id),
  audit: auditPage,
};
const inside = Object.entries(PAGES).map(([name, page]) => [name, (main, rest) => (current ? page(main, rest) : loginPage(main, enter))]);
const show = startPages(Object.fromEntries(inside), "services");

function tellWho() {
  for (const id of ["sections", "leave-button"]) byId(id).hidden = !current;
  byId("audit-link").hidden = !may("audit.read");
  setText(byId("status"), current ? `${current.user_name}, ${current.role} of ${current.organisation}` : "Not logged in");
}

function enter() {
  tellWho();
  show();
  byId("main").focus();
}

byId("leave-button").addEventListener("click", () => {
  forget();
  enter();
});
onRefused((status) => {
  // An expired token means to log in again. A 403 is shown where the action was tried.
  if (status === 401 && current) {
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
poll(5000, async () => {
  try {
    await get("health/readiness", { quiet: true });
    if (away) tellWho();
    away = false;
  } catch {
    away = true;
    setText(byId("status"), "Gateway does not answer");
  }
});
