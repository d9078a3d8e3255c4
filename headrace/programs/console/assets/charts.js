// SPDX-License-Identifier: Apache-2.0
// Charts: lines over time with uPlot, bars, and traffic shares. Colours come from the stylesheet.

import { get, latest } from "./api.js";
import { bytes, clock, div, duration, h, missing, ms, number, percent, perSecond, poll, segments, setText, span, svg } from "./components.js";

/* global uPlot */

const HEIGHT = 160;
const RANGES = [300, 900, 3600];
const SYNC = uPlot.sync("console");

function roundUp(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((times) => times * unit).find((bound) => bound >= value * 0.999);
}

// The places of points without a neighbour, which a line would not show.
function lonely(values) {
  const empty = (place) => missing(values[place]);
  return values.map((_, place) => place).filter((place) => !empty(place) && empty(place - 1) && empty(place + 1));
}

export class LineChart {
  constructor(title, names, format, most = 0) {
    Object.assign(this, { title, names, format, most, range: RANGES[0], end: 0, data: null, plot: null });
    this.values = names.map(() => h("strong"));
    this.swatches = names.map((_, place) => h("span", { class: `swatch s${place}` }));
    this.place = h("div", { class: "plot", role: "img", "aria-label": title });
    const legend = names.map((name, place) => h("li", {}, this.swatches[place], `${name} `, this.values[place]));
    this.element = h("figure", { class: "card" }, h("figcaption", {}, title), this.place, h("ul", { class: "legend" }, legend));
    this.resize = new ResizeObserver(() => this.show());
    this.resize.observe(this.place);
  }

  colour(place, alpha = 1) {
    const { color } = getComputedStyle(this.swatches[place]);
    return alpha === 1 ? color : color.replace("rgb(", "rgba(").replace(")", `, ${alpha})`);
  }

  draw(times, columns, range) {
    this.range = range;
    this.end = times.length ? times[times.length - 1] : Date.now() / 1000;
    this.data = [times, ...columns];
    this.show();
    this.tell(null);
  }

  show() {
    const width = this.place.clientWidth;
    if (!width || !this.data) return;
    if (!this.plot) this.plot = this.make(width);
    else if (this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
    this.plot.setData(this.data);
  }

  make(width) {
    const text = () => getComputedStyle(this.element.querySelector("li")).color;
    const grid = () => getComputedStyle(this.place).borderTopColor;
    const axis = { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const series = this.names.map((_, place) => ({
      stroke: () => this.colour(place),
      fill: place ? undefined : () => this.colour(0, 0.1),
      width: 1.5,
      dash: place ? [[], [6, 3], [2, 3]][place % 3] : undefined,
      points: { show: true, size: 5, fill: () => this.colour(place), filter: (_, index) => lonely(this.data[index]) },
    }));
    const plot = new uPlot(
      {
        width,
        height: HEIGHT,
        padding: [8, 18, 0, 0],
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false }, sync: { key: SYNC.key, scales: ["x", null] }, points: { size: 6 } },
        scales: {
          x: { time: true, range: () => [this.end - this.range, this.end] },
          y: { range: (_, least, most) => [0, this.most || roundUp(most)] },
        },
        axes: [
          { ...axis, size: 26, space: 34, values: (_, splits) => splits.map((time) => clock(new Date(1000 * time), false)) },
          { ...axis, size: 62, space: 38, values: (_, splits) => splits.map((value) => this.format(value)) },
        ],
        series: [{}, ...series],
        hooks: { setCursor: [(made) => this.tell(made.cursor.idx ?? null)] },
      },
      this.data,
      this.place,
    );
    plot.root.setAttribute("aria-hidden", "true");
    return plot;
  }

  // Show the values at a place; without one, the newest.
  tell(place) {
    const texts = this.data.slice(1).map((values) => {
      if (place !== null) return this.format(values[place] ?? null);
      const known = values.slice(-3).filter((value) => !missing(value));
      return this.format(known.length ? known[known.length - 1] : null);
    });
    texts.forEach((text, at) => setText(this.values[at], text));
    if (place === null) this.place.setAttribute("aria-label", `${this.title}: ${this.names.map((name, at) => `${name} ${texts[at]}`).join(", ")}`);
  }

  close() {
    this.resize.disconnect();
    this.plot?.destroy();
  }
}

// Which charts there are: title, series and their names, format, largest value.
const REQUESTS = ["Requests", { requests: "answered", failures: "failed" }, perSecond];
const LATENCY = ["Latency", { p50: "p50", p95: "p95", p99: "p99" }, ms];
const TOKENS = ["Tokens", { generated: "generated", prompt: "prompt" }, perSecond];
export const MODEL_CHARTS = [
  REQUESTS,
  LATENCY,
  ["Queue and compute time, mean", { queue: "queue", compute: "compute" }, ms],
  ["Requests in the server", { in_flight: "in flight", waiting: "waiting" }, number],
  ["Batch size, mean", { batch: "rows" }, number],
];
export const LANGUAGE_CHARTS = [
  ["Time to first token", { ttft_p50: "p50", ttft_p95: "p95" }, ms],
  ["Inter-token latency", { itl_p50: "p50", itl_p95: "p95" }, ms],
  TOKENS,
  ["Sequences", { running: "running", queued: "waiting" }, number],
  ["KV cache", { kv: "in use" }, percent, 100],
  ["Prefix cache hit rate", { prefix: "hits" }, percent, 100],
  REQUESTS,
  ["Request duration", { p50: "p50", p95: "p95", p99: "p99" }, ms],
];
export const SERVER_CHARTS = [
  REQUESTS,
  LATENCY,
  ["Requests in the server", { in_flight: "in flight", waiting: "waiting" }, number],
  TOKENS,
  ["CPU", { cpu: "machine", process_cpu: "this server" }, percent],
  ["Memory", { memory: "machine", process_memory: "this server" }, bytes],
  ["GPUs, mean", { gpu: "busy", gpu_memory: "memory used" }, percent, 100],
];
const OPTIONAL = new Set(["Tokens", "GPUs, mean"]);

let range = RANGES[0];

// The charts of a model, or ("") of the server, with a choice of the time range. Call `close` on leaving the page.
export function historyCharts(model, definitions) {
  const kept = latest()?.server.history_seconds || RANGES[2];
  const ranges = [...RANGES.filter((each) => each <= kept), ...(RANGES.includes(kept) ? [] : [kept])].sort((one, other) => one - other);
  if (!ranges.includes(range)) range = ranges[0];
  const charts = definitions.map(([title, series, format, most]) => [new LineChart(title, Object.values(series), format, most), Object.keys(series)]);
  const problem = h("p", { class: "soft", hidden: true });
  let times = [];
  let columns = {};

  function draw() {
    const from = times.length ? times[times.length - 1] - range : 0;
    const first = Math.max(0, times.findIndex((time) => time >= from));
    const shown = times.slice(first);
    for (const [chart, names] of charts) {
      chart.element.hidden = OPTIONAL.has(chart.title) && names.every((name) => !columns[name]);
      chart.draw(shown, names.map((name) => columns[name]?.slice(first) || shown.map(() => null)), range);
    }
  }

  async function look() {
    try {
      const since = times.length ? times[times.length - 1] : 0;
      const told = await get(`console/api/history?${new URLSearchParams({ model, since })}`, { quiet: true });
      // A server that was started again has another history.
      if (times.length && latest()?.server.started > times[0]) [times, columns] = [[], {}];
      const before = times.length;
      times = [...times, ...told.time];
      for (const name of new Set([...Object.keys(columns), ...Object.keys(told.series)])) {
        columns[name] = [...(columns[name] || new Array(before).fill(null)), ...(told.series[name] || told.time.map(() => null))];
      }
      const extra = times.length - Math.ceil(kept / told.interval_seconds);
      if (extra > 0) {
        times = times.slice(extra);
        for (const name of Object.keys(columns)) columns[name] = columns[name].slice(extra);
      }
      problem.hidden = times.length > 0;
      setText(problem, "The first point comes after ten seconds.");
    } catch (error) {
      problem.hidden = false;
      setText(problem, error.needsKey ? "Charts need a key with the scope read." : error.message);
    }
    draw();
  }

  const choose = (value) => {
    range = value;
    draw();
  };
  const bar = segments("Time range", ranges.map((each) => [each, duration(each)]), range, choose);
  const element = h("section", { class: "history", "aria-label": "Metrics" }, div("head", h("h2", {}, "Metrics"), bar), problem, div("charts", charts.map(([chart]) => chart.element)));
  const stop = poll(5000, look);
  window.addEventListener("themechange", draw);
  return {
    element,
    close() {
      stop();
      window.removeEventListener("themechange", draw);
      for (const [chart] of charts) chart.close();
    },
  };
}

export function barChart(title, rows, empty) {
  const all = rows.reduce((sum, [, count]) => sum + count, 0);
  const largest = Math.max(...rows.map(([, count]) => count), 1);
  const bars = rows.flatMap(([name, count]) => [h("span", {}, name), h("progress", { max: largest, value: count, "aria-label": `${name}: ${count}` }), h("span", {}, `${number(count)} (${Math.round((100 * count) / all)} %)`)]);
  return h("figure", { class: "card" }, h("figcaption", {}, title), div("bars", all ? bars : span("soft", empty)));
}

// The traffic shares of revisions as one bar, with the newest marked.
export function splitBar(shares) {
  let at = 0;
  const parts = shares.map((share) => {
    const part = svg("rect", { x: at, y: 0, width: share.percent, height: 10, class: share.latest ? "newest" : "before" });
    at += share.percent;
    return part;
  });
  const told = shares.map((share) => `${share.percent} % ${share.latest ? "newest" : "before"}${share.revision ? ` (${share.revision})` : ""}`);
  return div(
    "split",
    svg("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": `Requests: ${told.join(", ")}` }, parts),
    h("ul", { class: "legend" }, shares.map((share, place) => h("li", {}, h("span", { class: `swatch ${share.latest ? "s1" : "s0"}` }), told[place]))),
  );
}
