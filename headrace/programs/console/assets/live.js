// SPDX-License-Identifier: Apache-2.0
// The page of live charts, for all models or one.

import { get, modelPath } from "./api.js";
import { BarChart, LineChart } from "./charts.js";
import { bytes, field, h, milliseconds, number, select } from "./dom.js";
import { history, latest, listen, steps } from "./store.js";

const percent = (value) => `${number(value)} %`;
const rate = (value) => `${number(value)}/s`;

const FEW = 8;

// One bar per batch size; if there are many sizes, one bar per power of two.
function bySize(sizes) {
  const each = Object.entries(sizes).map(([rows, count]) => [Number(rows), count]).sort((one, other) => one[0] - other[0]);
  if (each.length <= FEW) return each.map(([rows, count]) => [`${rows} ${rows === 1 ? "row" : "rows"}`, count]);
  const ranges = new Map();
  for (const [rows, count] of each) {
    const power = Math.ceil(Math.log2(rows));
    ranges.set(power, (ranges.get(power) || 0) + count);
  }
  return [...ranges].map(([power, count]) => [power ? `${2 ** (power - 1) + 1} to ${2 ** power} rows`.replace("2 to 2", "2") : "1 row", count]);
}

export function livePage(main, wanted) {
  const chosen = wanted ? decodeURIComponent(wanted) : "";
  const names = [...new Set((latest()?.models || []).map((model) => model.name))].sort();
  if (chosen && !names.includes(chosen)) names.push(chosen);
  const choice = select([["", "All models"], ...names.map((name) => [name, name])], chosen, (value) => {
    location.hash = value ? `#/live/${encodeURIComponent(value)}` : "#/live";
  });
  const charts = {
    requests: new LineChart("Requests", ["answered", "failed"], rate),
    latency: new LineChart("Latency", ["p50", "p95", "p99"], milliseconds),
    times: new LineChart("Time in queue and computing, mean", ["queue", "compute"], milliseconds),
    queue: new LineChart("Requests in the server", ["in flight", "waiting"], number),
    batch: new LineChart("Rows of a batch, mean", ["rows"], number),
    sizes: new BarChart("Batch sizes, last two minutes", "no batch yet"),
    reasons: new BarChart("Why batches formed, last two minutes", "no batch yet"),
    tokens: new LineChart("Tokens", ["generated", "prompt"], rate),
    cpu: new LineChart("CPU", ["machine", "this server"], percent),
    memory: new LineChart("Memory", ["machine", "this server"], bytes),
    gpu: new LineChart("GPUs", ["busy", "memory used"], percent, 100),
  };
  const recent = h("tbody");
  const batches = h(
    "section",
    { class: "card scroll", hidden: !chosen, "aria-labelledby": "recent-title" },
    h("h2", { id: "recent-title" }, "Last batches"),
    h("table", {}, h("thead", {}, h("tr", {}, ...["Reason", "Rows", "Requests", "Oldest waited", "Left waiting", "Instance"].map((text) => h("th", { scope: "col" }, text)))), recent),
  );
  main.replaceChildren(
    h("h1", {}, "Live"),
    h("div", { class: "bar" }, field("Model", choice)),
    h("div", { class: "charts" }, Object.values(charts).map((chart) => chart.element)),
    batches,
  );

  function draw() {
    const made = steps(chosen);
    const of = (name) => made.map((each) => each[name]);
    charts.requests.draw([of("requests"), of("failures")]);
    charts.latency.draw([of("p50"), of("p95"), of("p99")]);
    charts.times.draw([of("queue"), of("compute")]);
    charts.queue.draw([of("in_flight"), of("waiting")]);
    charts.batch.draw([of("batch")]);
    const sizes = {};
    const reasons = [];
    for (const each of made) {
      for (const [rows, count] of Object.entries(each.batches)) sizes[rows] = (sizes[rows] || 0) + count;
      each.reasons.forEach((count, place) => (reasons[place] = (reasons[place] || 0) + count));
    }
    charts.sizes.draw(bySize(sizes));
    const words = latest()?.reasons || [];
    charts.reasons.draw(words.map((word, place) => [word, reasons[place] || 0]).filter(([, count]) => count));
    charts.tokens.element.hidden = made.every((each) => each.generated === null);
    charts.tokens.draw([of("generated"), of("prompt")]);
    drawMachine(made);
  }

  function drawMachine(made) {
    const seen = history.slice(1);
    charts.cpu.draw([
      seen.map(({ machine }) => (machine.cpu_utilization === undefined ? null : 100 * machine.cpu_utilization)),
      made.map((each) => 100 * each.process_cpu),
    ]);
    charts.memory.draw([seen.map(({ machine }) => machine.cpu_memory_used_bytes ?? null), seen.map(({ process }) => process.memory_bytes)]);
    charts.gpu.element.hidden = !seen.some(({ machine }) => machine.gpus.length);
    const mean = (gpus, share) => (gpus.length ? (100 * gpus.reduce((sum, gpu) => sum + share(gpu), 0)) / gpus.length : null);
    charts.gpu.draw([
      seen.map(({ machine }) => mean(machine.gpus, (gpu) => gpu.utilization || 0)),
      seen.map(({ machine }) => mean(machine.gpus, (gpu) => (gpu.memory_used_bytes || 0) / (gpu.memory_total_bytes || 1))),
    ]);
  }

  let round = 0;
  async function drawRecent() {
    round += 1;
    if (!chosen || round % 3 !== 1) return;
    try {
      const told = await get(`${modelPath(chosen)}/stats`, { quiet: true });
      const rows = told.model_stats.flatMap((each) => each.batching.recent).reverse();
      recent.replaceChildren(
        ...rows.map((row) =>
          h("tr", {}, ...[row.reason, row.rows, row.requests, milliseconds(row.oldest_waited_microseconds / 1000), row.left_waiting, row.instance].map((text) => h("td", {}, String(text)))),
        ),
      );
    } catch {
      recent.replaceChildren();
    }
  }

  draw();
  drawRecent();
  return listen((error) => {
    if (error) return;
    draw();
    drawRecent();
  });
}
