// SPDX-License-Identifier: Apache-2.0
// Line charts over two minutes, and bar charts, as SVG. Colours come from the stylesheet, for light and dark themes.

import { h, s, setText } from "./dom.js";

const WIDTH = 330;
const HEIGHT = 130;
const LEFT = 50;
const BOTTOM = 16;
const POINTS = 120;

function roundUp(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((times) => times * unit).find((bound) => bound >= value * 0.999);
}

function path(values, top) {
  const wide = (WIDTH - LEFT - 6) / (POINTS - 1);
  const high = HEIGHT - BOTTOM - 8;
  const first = POINTS - values.length;
  let text = "";
  let down = false;
  values.forEach((value, place) => {
    if (value === null || value === undefined) {
      down = false;
      return;
    }
    const x = (LEFT + (first + place) * wide).toFixed(1);
    const y = (8 + high * (1 - Math.min(1, value / top))).toFixed(1);
    // Draw a single value between two gaps as a dot.
    text += down ? `L${x} ${y}` : `M${x} ${y}h.1`;
    down = true;
  });
  return text;
}

export class LineChart {
  constructor(title, names, shown, most = 0) {
    this.names = names;
    this.shown = shown;
    this.most = most;
    this.lines = names.map((_, place) => s("path", { class: `series s${place}` }));
    this.labels = [0, 1, 2].map((place) =>
      s("text", { x: LEFT - 5, y: 12 + (place * (HEIGHT - BOTTOM - 8)) / 2, "text-anchor": "end" }),
    );
    this.values = names.map(() => h("span"));
    const grid = [0, 1, 2].map((place) => {
      const y = 8 + (place * (HEIGHT - BOTTOM - 8)) / 2;
      return s("path", { class: "grid", d: `M${LEFT} ${y}H${WIDTH - 6}` });
    });
    const times = [["-2 min", LEFT, "start"], ["now", WIDTH - 6, "end"]].map(([text, x, anchor]) =>
      s("text", { x, y: HEIGHT - 3, "text-anchor": anchor }, text),
    );
    this.svg = s(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title },
      grid,
      this.labels,
      times,
      this.lines,
    );
    const legend = names.map((name, place) =>
      h(
        "li",
        {},
        s("svg", { viewBox: "0 0 22 8", "aria-hidden": "true" }, s("path", { class: `series s${place}`, d: "M0 4H22" })),
        `${name} `,
        this.values[place],
      ),
    );
    this.element = h("figure", { class: "card" }, h("figcaption", {}, title), this.svg, h("ul", { class: "legend" }, legend));
    this.title = title;
  }

  draw(series) {
    const largest = Math.max(0, ...series.flat().filter((value) => value !== null && value !== undefined));
    const top = this.most || roundUp(largest);
    series.forEach((values, place) => this.lines[place].setAttribute("d", path(values, top)));
    [top, top / 2, 0].forEach((value, place) => setText(this.labels[place], this.shown(value)));
    const last = series.map((values) => {
      const known = values.slice(-5).filter((value) => value !== null && value !== undefined);
      return known.length ? this.shown(known[known.length - 1]) : "–";
    });
    last.forEach((text, place) => setText(this.values[place], text));
    this.svg.setAttribute("aria-label", `${this.title}: ${this.names.map((name, place) => `${name} ${last[place]}`).join(", ")}`);
  }
}

export class BarChart {
  constructor(title, nothing) {
    this.nothing = nothing;
    this.bars = h("div", { class: "bars" });
    this.element = h("figure", { class: "card" }, h("figcaption", {}, title), this.bars);
  }

  draw(rows) {
    const all = rows.reduce((sum, [, count]) => sum + count, 0);
    if (!all) {
      this.bars.replaceChildren(h("span", { class: "soft" }, this.nothing));
      return;
    }
    const largest = Math.max(...rows.map(([, count]) => count));
    this.bars.replaceChildren(
      ...rows.flatMap(([name, count]) => [
        h("span", {}, name),
        h("progress", { max: largest, value: count, "aria-label": `${name}: ${count}` }),
        h("span", {}, `${count} (${Math.round((100 * count) / all)} %)`),
      ]),
    );
  }
}
