// SPDX-License-Identifier: Apache-2.0
// The traffic splits page: weights, statistics and comparisons of a model's versions.

import { get } from "./api.js";
import { h, milliseconds, number } from "./dom.js";

const share = (value) => (value === null || value === undefined ? "–" : `${number(100 * value)} %`);

function table(caption, columns, rows) {
  return h(
    "div",
    { class: "scroll" },
    h("h3", {}, caption),
    h("table", {}, h("thead", {}, h("tr", {}, columns.map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, rows.map((row) => h("tr", {}, row.map((text) => h("td", {}, String(text))))))),
  );
}

function reportOf(report) {
  const versions = report.versions.map((each) => [
    each.label ? `${each.version} (${each.label})` : each.version, share(each.weight), share(each.effective_weight), each.state, each.requests, each.errors,
    share(each.error_rate), milliseconds(each.latency_ms.p50), milliseconds(each.latency_ms.p99), each.reason,
  ]);
  const parts = [table("Versions", ["Version", "Weight", "Now", "State", "Requests", "Errors", "Rate", "p50", "p99", "Reason"], versions)];
  if (report.shadows.length) {
    const shadows = report.shadows.map((each) => [each.version, share(each.share), each.compared, share(each.agreement), share(each.argmax_agreement), each.errors, each.dropped]);
    parts.push(table("Shadows", ["Version", "Share", "Compared", "Agree", "Same choice", "Errors", "Dropped"], shadows));
  }
  const compared = report.comparisons.flatMap((each) =>
    ["errors", "latency"].map((what) => [each.version, each.against, what, each[what].test, each[what].p === null ? "–" : number(each[what].p), each[what].verdict]),
  );
  if (compared.length) parts.push(table("Compared", ["Version", "With", "Of", "Test", "p", "Verdict"], compared));
  return h("section", { class: "card" }, h("h2", {}, report.model), h("p", { class: "soft" }, `since ${report.since}, baseline ${report.baseline}`), parts);
}

export function trafficPage(main) {
  const place = h("div", {}, h("p", { class: "soft" }, "Loading."));
  main.replaceChildren(h("h1", {}, "A/B"), place);
  let over = false;
  let timer = 0;
  async function draw() {
    try {
      const { splits } = await get("admin/traffic");
      const reports = await Promise.all(splits.map(({ model }) => get(`admin/traffic/${encodeURIComponent(model)}/report`)));
      if (over) return;
      place.replaceChildren(...(reports.length ? reports.map(reportOf) : [h("p", { class: "empty" }, "No traffic is split. To split it: headrace ab set MODEL 1=0.9 2=0.1")]));
    } catch (error) {
      if (!over) place.replaceChildren(h("p", { class: "failed" }, error.message));
      return;
    }
    timer = setTimeout(draw, 3000);
  }
  draw();
  return () => {
    over = true;
    clearTimeout(timer);
  };
}
