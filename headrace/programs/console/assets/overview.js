// SPDX-License-Identifier: Apache-2.0
// The overview of a server: addresses, failed models, GPUs and metrics.

import { latest, listen, models, rates } from "./api.js";
import { historyCharts, SERVER_CHARTS } from "./charts.js";
import { badge, bytes, card, div, duration, facts, h, link, modelLink, ms, number, percent, perSecond, plural, share, span, table, when } from "./components.js";

const PORTS = [["http", "HTTP"], ["grpc", "gRPC"], ["metrics", "Metrics"]];

function about(now) {
  const { version, started, addresses } = now.server;
  const all = now.models.map((model) => model.name);
  const ready = new Set(now.models.filter((model) => model.state === "READY").map((model) => model.name));
  const address = (name) => (name === "grpc" ? addresses.grpc?.replace(/^\w+:\/\//, "") : addresses[name]);
  return card(
    "Server",
    facts([
      ["State", badge(now.ready ? "ready" : "waiting", now.ready ? "ready" : "not ready")],
      ["Version", version],
      ["Uptime", h("span", {}, duration(now.time - started), span("soft", " since "), when(started))],
      ["Models ready", link("#/models", `${ready.size} of ${new Set(all).size}`)],
      ["GPUs", now.machine.gpus.length ? null : "none measured"],
      ...PORTS.map(([name, label]) => [label, address(name) ? h("code", {}, address(name)) : null]),
    ]),
    h("p", { class: "links" }, link("docs", "API documentation", { target: "_blank" }), link("metrics", "Prometheus metrics", { target: "_blank" }), link("openapi.json", "OpenAPI", { target: "_blank" })),
  );
}

function tiles(now) {
  const rate = rates("") || {};
  const gpus = now.machine.gpus;
  const values = [
    ["Requests", perSecond(rate.requests)],
    ["Failed", perSecond(rate.failures)],
    ["p95 latency", ms(rate.p95)],
    ["In flight", number(rate.in_flight)],
    ...(rate.generated === undefined ? [] : [["Tokens", perSecond(rate.generated)]]),
    ["CPU", percent(rate.cpu ?? rate.process_cpu)],
    ["Memory", bytes(now.process.memory_bytes)],
    ...(gpus.length ? [["GPUs busy", percent(rate.gpu)]] : []),
  ];
  return h("dl", { class: "tiles" }, values.map(([name, value]) => div("card", h("dt", {}, name), h("dd", {}, value))));
}

function failures() {
  const failed = models().filter((model) => model.state === "UNAVAILABLE" && model.reason && model.reason !== "unloaded");
  if (!failed.length) return null;
  const rows = failed.map((model) => [modelLink(model.name), model.version || "–", model.reason]);
  return card(`${plural(new Set(failed.map((model) => model.name)).size, "model")} failed to load`, table("Failed models", ["Model", "Version", "Why"], rows));
}

function gpuTable(gpus) {
  const rows = gpus.map((gpu, place) => [
    h("span", {}, `GPU ${place}`, div("soft mono", gpu.uuid)),
    share(gpu.utilization),
    gpu.memory_total_bytes ? `${bytes(gpu.memory_used_bytes)} of ${bytes(gpu.memory_total_bytes)}` : "–",
    gpu.power_usage === undefined ? "–" : `${number(gpu.power_usage)} W${gpu.power_limit ? ` of ${number(gpu.power_limit)} W` : ""}`,
  ]);
  return card("GPUs", table("GPUs", ["GPU", "Busy", "Memory used", "Power"], rows));
}

export function overviewPage(main) {
  const place = div("stack");
  const charts = historyCharts("", SERVER_CHARTS);
  main.replaceChildren(h("h1", {}, "Overview"), place, charts.element);
  let shown = "";
  function draw() {
    const now = latest();
    if (!now) return;
    // The uptime changes each second, other facts rarely: links keep the keyboard focus.
    const text = JSON.stringify([now.server, now.ready, now.models.map((model) => [model.name, model.state, model.reason]), Math.floor(now.time / 10), rates(""), now.machine.gpus]);
    if (text === shown || place.contains(document.activeElement)) return;
    shown = text;
    const { gpus } = now.machine;
    place.replaceChildren(...[tiles(now), failures(), gpus.length ? div("two", about(now), gpuTable(gpus)) : about(now)].filter(Boolean));
  }
  draw();
  const stop = listen((error) => error || draw());
  return () => {
    stop();
    charts.close();
  };
}
