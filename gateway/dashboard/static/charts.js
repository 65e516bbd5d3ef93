// The charts over time: uPlot canvases, each with a legend in words, a spoken summary and a table of the same values.

import { byId, element, keyed, setText } from "./dom.js";
import { clock, count, duration, percent, rate } from "./format.js";

const HEIGHT = 132;
const TABLE_ROWS = 12;
const MAX_POINTS = 900;

const SPECS = [
  {
    title: "Time to first token",
    format: duration,
    series: [
      { field: "ttft_p50_ms", label: "median", colour: "--series-1" },
      { field: "ttft_p95_ms", label: "95th percentile", colour: "--series-2", dash: [5, 4] },
    ],
  },
  {
    title: "Inter-token latency",
    format: duration,
    series: [
      { field: "itl_p50_ms", label: "median", colour: "--series-1" },
      { field: "itl_p95_ms", label: "95th percentile", colour: "--series-2", dash: [5, 4] },
    ],
  },
  {
    title: "Tokens per second",
    format: rate,
    series: [
      { field: "generation_tokens_per_s", label: "written", colour: "--decode", fill: true },
      { field: "prompt_tokens_per_s", label: "read", colour: "--prefill", dash: [5, 4] },
    ],
  },
  {
    title: "Queue",
    format: count,
    least: 4,
    series: [
      { field: "waiting_prefill", label: "wait to be read", colour: "--prefill", stepped: true },
      { field: "waiting_decode", label: "wait to be written", colour: "--decode", stepped: true, dash: [5, 4] },
    ],
  },
  {
    title: "Batch",
    format: count,
    least: 4,
    series: [{ field: "running", label: "sequences running", colour: "--series-1", stepped: true, fill: true }],
  },
  {
    title: "Prefix cache hit rate",
    format: percent,
    least: 1,
    series: [{ field: "hit_rate", label: "of prompt tokens, last minute", colour: "--series-3", fill: true }],
  },
];

/** All charts, and the points that they share. */
export class Charts {
  #fields = [];
  #points = [];
  #charts;
  #span = 300;

  constructor(root) {
    this.#charts = SPECS.map((spec) => new Chart(root, spec));
    byId("span").addEventListener("change", (event) => {
      this.#span = Number(event.target.value);
      this.#draw();
    });
    new ResizeObserver(() => this.#charts.forEach((chart) => chart.fit())).observe(root);
  }

  /** Begin anew with what the gateway remembers. */
  load(fields, rows) {
    this.#fields = fields;
    this.#points = rows.map((row) => this.#named(row));
    this.#draw();
  }

  /** Add one second and return it, by name. */
  add(row) {
    const point = this.#named(row);
    if (this.#points.at(-1)?.time === point.time) this.#points.pop(); // the history's last one
    this.#points.push(point);
    if (this.#points.length > MAX_POINTS) this.#points.shift();
    this.#draw();
    return point;
  }

  /** Draw again in the colours of the theme as it is now. */
  repaint() {
    this.#charts.forEach((chart) => chart.build());
    this.#draw();
  }

  #named(row) {
    return Object.fromEntries(this.#fields.map((field, index) => [field, row[index]]));
  }

  #draw() {
    if (!this.#points.length) return;
    const end = this.#points.at(-1).time;
    const shown = this.#points.filter((point) => point.time > end - this.#span);
    this.#charts.forEach((chart) => chart.draw(shown, end - this.#span, end));
  }
}

class Chart {
  #spec;
  #plot = null;
  #canvas;
  #values;
  #table;
  #details;
  #points = [];
  #from = 0;
  #to = 1;

  constructor(root, spec) {
    this.#spec = spec;
    this.#values = spec.series.map(() => element("b", { text: "–" }));
    const legend = spec.series.map((one, index) =>
      element("li", {}, element("i", { class: `line ${one.dash ? "dashed" : ""}`, "data-colour": one.colour }),
        `${one.label} `, this.#values[index]));
    this.#canvas = element("div", { class: "plot", role: "img" });
    this.#table = element("tbody");
    this.#details = element("details", { class: "values" },
      element("summary", {}, "Table", element("span", { class: "visually-hidden", text: ` of ${spec.title}` })),
      element("table", {},
        element("thead", {}, element("tr", {}, element("th", { scope: "col", text: "Time" }),
          ...spec.series.map((one) => element("th", { scope: "col", text: one.label })))),
        this.#table));
    root.append(element("figure", { class: "panel chart" },
      element("figcaption", {}, element("h3", { text: spec.title }), element("ul", { class: "legend" }, ...legend)),
      this.#canvas, this.#details));
    this.#details.addEventListener("toggle", () => this.#fillTable());
    this.build();
  }

  /** Make the plot, in the theme's colours. */
  build() {
    this.#plot?.destroy();
    const colour = (name) => themeColour(this.#canvas, name);
    const axis = { stroke: colour("--muted"), font: "11px system-ui, sans-serif", ticks: { show: false } };
    const grid = { stroke: colour("--grid"), width: 1 };
    const least = this.#spec.least ?? 0;
    this.#plot = new uPlot({
      width: Math.max(this.#canvas.clientWidth, 50),
      height: HEIGHT,
      padding: [8, 18, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "baton" }, y: false, drag: { x: false, y: false }, points: { size: 6 } },
      scales: {
        x: { time: false, range: () => [this.#from, this.#to] },
        y: { range: (_plot, _low, high) => [0, Math.max(high === null ? 0 : high * 1.1, least) || 1] },
      },
      axes: [
        { ...axis, grid: { show: false }, size: 22, space: 64, incrs: [60, 120, 300, 600],
          values: (_plot, splits) => splits.map((at) => clock(at, false)) },
        { ...axis, grid, size: 52, space: 32,
          values: (_plot, splits) => splits.map((value) => this.#spec.format(value)) },
      ],
      series: [{}, ...this.#spec.series.map((one) => ({
        label: one.label,
        stroke: colour(one.colour),
        width: 1.75,
        dash: one.dash,
        fill: one.fill ? faint(colour(one.colour)) : undefined,
        paths: one.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
        points: { show: false },
      }))],
      hooks: { setCursor: [(plot) => this.#label(plot.cursor.idx)] },
    }, this.#data(), this.#canvas);
  }

  /** Take the width that there is. */
  fit() {
    const width = this.#canvas.clientWidth;
    if (width && width !== this.#plot.width) this.#plot.setSize({ width, height: HEIGHT });
  }

  /** Show `points`, on an axis from `from` to `to`. */
  draw(points, from, to) {
    this.#points = points;
    this.#from = from;
    this.#to = to;
    this.#plot.setData(this.#data());
    this.#label(this.#plot.cursor.idx);
    this.#canvas.setAttribute("aria-label", this.#summary());
    if (this.#details.open) this.#fillTable();
  }

  #data() {
    return [this.#points.map((point) => point.time),
      ...this.#spec.series.map(({ field }) => this.#points.map((point) => point[field]))];
  }

  /** Put the values under the pointer, or the newest ones, into the legend. */
  #label(index) {
    const point = this.#points[index ?? this.#points.length - 1];
    this.#spec.series.forEach(({ field }, at) =>
      setText(this.#values[at], this.#spec.format(point?.[field] ?? null)));
  }

  #summary() {
    const minutes = Math.round((this.#to - this.#from) / 60);
    const parts = this.#spec.series.map(({ field, label }) => {
      const known = this.#points.map((point) => point[field]).filter((value) => value !== null);
      if (!known.length) return `${label}: nothing measured`;
      const now = this.#points.at(-1)[field];
      return `${label}: now ${this.#spec.format(now)}, highest ${this.#spec.format(Math.max(...known))}`;
    });
    return `${this.#spec.title}, last ${minutes} minutes. ${parts.join(". ")}.`;
  }

  #fillTable() {
    if (!this.#details.open) return;
    const step = Math.max(1, Math.ceil((this.#to - this.#from) / TABLE_ROWS));
    const rows = this.#points.filter((point, at) => point.time % step === 0 || at === this.#points.length - 1).reverse();
    keyed(this.#table, rows, (point) => point.time,
      (point) => element("tr", {}, element("th", { scope: "row", text: clock(point.time) }),
        ...this.#spec.series.map(({ field }) => element("td", { text: this.#spec.format(point[field]) }))),
      () => {});
  }
}

/** Return what a custom property of the theme is at present, as a colour that a canvas knows. */
function themeColour(near, name) {
  const probe = near.appendChild(element("span", { class: "probe", "data-colour": name }));
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

function faint(colour) {
  const [red, green, blue] = colour.match(/[\d.]+/g);
  return `rgba(${red}, ${green}, ${blue}, 0.12)`;
}
