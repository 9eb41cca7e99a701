// Plots of a disk: lines and stacked areas by uPlot, and the heat map of latencies.

import { duration } from "./format.js";
import { h, setAttribute } from "./dom.js";

const KEPT = 300;
const COLUMNS = 120;
/** Rows of the heat map: halves of doublings, from 1 µs on. */
const ROWS = 54;
const LOWEST = Math.log2(1000);

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** The sums from each series on, which are drawn as areas above each other, the last one at the bottom. */
function stacked(data, areas) {
  const sums = data.map((series) => [...series]);
  for (let at = areas - 1; at >= 1; at -= 1) {
    sums[at] = sums[at].map((value, index) => (value ?? 0) + (sums[at + 1]?.[index] ?? 0));
  }
  return sums;
}

/** The power of ten below or above. */
const decade = (value, round) => 10 ** round(Math.log10(value) + (round === Math.ceil ? 0.01 : -0.01));

/**
 * A plot of values over time, of `span` seconds at least. `series`: names, each a line; those before `areas` are
 * stacked.
 */
export class Plot {
  constructor(title, series, { areas = 0, value, log = false, span = 60 } = {}) {
    Object.assign(this, { series, areas, value, log, span });
    this.data = [[], ...series.map(() => [])];
    this.box = h("div");
    this.element = h("section", { class: "plot", "aria-label": title }, h("h2", {}, title), this.box);
    this.resize = new ResizeObserver(() => this.fit());
    this.resize.observe(this.element);
    this.themes = new MutationObserver(() => this.build());
    this.themes.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.rebuild = () => this.build();
    this.scheme.addEventListener("change", this.rebuild);
    this.build();
  }

  shown() {
    if (!this.areas) return this.data;
    const layers = stacked(this.data.slice(0, this.areas + 1), this.areas);
    return [...layers, ...this.data.slice(this.areas + 1)];
  }

  build() {
    this.plot?.destroy();
    const [dim, line] = [style("--dim"), style("--line")];
    const axis = { stroke: dim, grid: { stroke: line, width: 1 }, ticks: { stroke: line } };
    const raw = (u, at, index) => (index === null ? null : this.data[at][index]);
    const series = this.series.map((label, at) => {
      const isArea = at < this.areas;
      const colour = style(`--s${at % 8}`);
      return {
        label,
        stroke: colour,
        width: isArea ? 1 : 1.5,
        dash: this.areas && !isArea ? [4, 4] : undefined,
        fill: isArea ? colour : undefined,
        points: { show: false },
        // The sum would say what lies below, too.
        value: (u, value, index, position) => {
          const own = raw(u, index, position ?? this.data[0].length - 1);
          return own === null || own === undefined ? "–" : this.value(own);
        },
      };
    });
    const options = {
      width: this.width(),
      height: 180,
      series: [{ value: (u, at) => (at ? new Date(at * 1000).toLocaleTimeString() : "") }, ...series],
      axes: [axis, { ...axis, size: 76, values: (u, at) => at.map((tick) => (tick === null ? "" : this.value(tick))) }],
      scales: {
        x: {
          range: (u, min, max = null) => {
            const end = max ?? Date.now() / 1000;
            return [Math.min(min ?? end, end - this.span), end];
          },
        },
        y: this.log
          ? { distr: 3, range: (u, low, top) => [decade(low || 1e4, Math.floor), decade(top || 1e6, Math.ceil)] }
          : { range: (u, min, max) => [0, (max || 1) * 1.1] },
      },
      cursor: { drag: { x: false, y: false } },
    };
    this.plot = new uPlot(options, this.shown(), this.box);
  }

  width() {
    return Math.max(200, Math.floor(this.element.clientWidth || 400));
  }

  fit() {
    if (this.plot.width !== this.width()) this.plot.setSize({ width: this.width(), height: 180 });
  }

  /** Shows these series instead: the times in seconds, and the values of each series. */
  set(data) {
    this.data = data;
    this.plot.setData(this.shown());
  }

  add(at, values) {
    // With a single reading uPlot would show years.
    if (!this.data[0].length) this.data.forEach((series, index) => series.push(index ? null : at - 1));
    this.data[0].push(at);
    values.forEach((value, index) => this.data[index + 1].push(value));
    if (this.data[0].length > KEPT) for (const series of this.data) series.shift();
    this.plot.setData(this.shown());
  }

  destroy() {
    this.resize.disconnect();
    this.themes.disconnect();
    this.scheme.removeEventListener("change", this.rebuild);
    this.plot.destroy();
  }
}

/** What was added to the buckets of a histogram between two readings, by upper bound. */
export function grown(before, now) {
  const old = new Map((before || []).map((bucket) => [bucket.below_ns, bucket.count]));
  return now
    .map(({ below_ns, count }) => ({ below_ns, count: count - (old.get(below_ns) ?? 0) }))
    .filter((bucket) => bucket.count > 0);
}

/** The histograms of several kinds of requests as one. */
export function merged(histograms) {
  const sums = new Map();
  for (const { below_ns, count } of histograms.flat()) sums.set(below_ns, (sums.get(below_ns) ?? 0) + count);
  return [...sums].map(([below_ns, count]) => ({ below_ns, count })).sort((a, b) => a.below_ns - b.below_ns);
}

/** The duration that a part of the requests did not exceed: the upper bound of its bucket. */
export function quantile(buckets, part) {
  const total = buckets.reduce((sum, bucket) => sum + bucket.count, 0);
  let left = total * part;
  for (const { below_ns, count } of buckets) {
    left -= count;
    if (left <= 0) return below_ns;
  }
  return null;
}

const rowOf = (ns) => Math.min(ROWS - 1, Math.max(0, Math.floor((Math.log2(ns) - LOWEST) * 2)));

/** Latencies over time: a column for each second, darker where more requests took that long. */
export class HeatMap {
  constructor(...controls) {
    this.columns = [];
    this.canvas = h("canvas", { class: "heat", role: "img", width: COLUMNS * 6, height: ROWS * 4 });
    this.text = h("p", { class: "dim" });
    this.element = h(
      "section",
      { class: "plot", "aria-label": "Latency heat map" },
      h("div", { class: "head" }, h("h2", {}, "Latency heat map"), controls),
      this.canvas,
      this.text,
    );
    this.themes = new MutationObserver(() => this.draw());
    this.themes.observe(document.documentElement, { attributeFilter: ["data-theme"] });
  }

  add(buckets) {
    const column = new Map();
    for (const { below_ns, count } of buckets) {
      // A bucket's bound belongs to the next one.
      const row = rowOf(below_ns - 1);
      column.set(row, (column.get(row) ?? 0) + count);
    }
    this.columns.push(column);
    if (this.columns.length > COLUMNS) this.columns.shift();
    this.draw();
  }

  draw() {
    const pen = this.canvas.getContext("2d");
    const scale = window.devicePixelRatio;
    const size = [this.canvas.clientWidth * scale || COLUMNS * 6, this.canvas.clientHeight * scale || ROWS * 4];
    const [width, height] = size.map(Math.round);
    if (this.canvas.width !== width || this.canvas.height !== height) Object.assign(this.canvas, { width, height });
    const [wide, high] = [width / COLUMNS, height / ROWS];
    const colour = ["--heat-r", "--heat-g", "--heat-b"].map(style).join(",");
    let most = 1;
    let [low, top] = [ROWS, -1];
    for (const column of this.columns) {
      for (const [row, count] of column) {
        most = Math.max(most, count);
        [low, top] = [Math.min(low, row), Math.max(top, row)];
      }
    }
    pen.fillStyle = style("--soft");
    pen.fillRect(0, 0, width, height);
    this.columns.forEach((column, at) => {
      const left = width - (this.columns.length - at) * wide;
      for (const [row, count] of column) {
        // By its logarithm: a single slow request among thousands is to be seen.
        const strength = 0.2 + 0.8 * (Math.log2(1 + count) / Math.log2(1 + most));
        pen.fillStyle = `rgba(${colour},${strength})`;
        pen.fillRect(left, height - (row + 1) * high, wide, high);
      }
    });
    pen.fillStyle = style("--dim");
    pen.font = `${11 * scale}px system-ui, sans-serif`;
    for (let row = 0; row < ROWS; row += 9) {
      pen.fillText(duration(2 ** (LOWEST + row / 2)), 2, height - row * high - 2);
    }
    const bound = (row) => duration(2 ** (LOWEST + row / 2));
    const said =
      top < 0
        ? "No requests have ended while this page was open."
        : `The last ${this.columns.length} s: between ${bound(low)} and ${bound(top + 1)}; newest on the right.`;
    if (this.text.textContent !== said) this.text.textContent = said;
    setAttribute(this.canvas, "aria-label", said);
  }

  destroy() {
    this.themes.disconnect();
  }
}
