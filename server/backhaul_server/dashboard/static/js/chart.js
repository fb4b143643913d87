// Wraps uPlot: a chart takes the size of its figure and the page's colours, and has a legend and a text alternative.

import { colour, drawInTheme, translucent } from "./colour.js";
import { addCopyButton } from "./copy.js";
import { element, explain, setText } from "./dom.js";
import { bytes, clock } from "./format.js";
import { overTime } from "./link.js";
import { MarkLayer } from "./marks.js";
import { fixedRange } from "./range.js";
import { TIME_STEPS_S } from "./ticks.js";

const FONT = '11.5px "Inter", system-ui, sans-serif';
const BYTE_STEPS = [0, 1, 2, 3, 4, 5].flatMap((power) => [1, 2, 5, 10, 20, 50, 100, 200, 500].map((count) => count * 1024 ** power));

/**
 * A chart in a figure, with a button that copies it as an image.
 *
 * @param {HTMLElement} figure receives the legend and the plot
 * @param {object} options
 *   `series`: [{label, hint?, colour, dash?, kind: "area" | "line" | "bars"}], from the bottom of a stack to its top;
 *   `stacked`: whether areas and bars are stacked; lines never are;
 *   `isBytes`: values are bytes, and ticks round numbers of KiB, MiB and so on; `format`: formats any other value;
 *   `x`: "time", with events marked and the range of the page, or the label of the x axis;
 *   `height`; `hasLegend`; `top(max)`: returns the upper end of the scale, given the largest value;
 *   `draw(uplot)`: draws more on top;
 *   `link`: how a chart not over time takes part in a shared cursor and in zooming, see link.js;
 *   `xRange()`: returns the [first, last] x values to show, or null for all.
 */
export class Chart {
  constructor(figure, options) {
    const isTime = options.x === "time";
    this.options = { height: 220, hasLegend: true, format: bytes, ...(isTime ? { link: overTime, xRange: fixedRange } : {}), ...options };
    this.figure = figure;
    this.values = [[]];
    this.plot = element("div", { class: "plot", role: "img", "aria-label": figure.querySelector("figcaption").textContent });
    this.note = element("p", { class: "empty", hidden: "" });
    this.legend = element("ul", { class: "legend" });
    if (this.options.hasLegend) figure.append(this.legend);
    this.plot.style.minHeight = `${this.options.height}px`;
    this.plot.append(this.note);
    figure.append(this.plot);
    this.setSeries(options.series ?? []);
    if (isTime) this.marks = new MarkLayer(this.plot, () => this.#area());
    this.options.link.cursor.add(this);
    this.plot.addEventListener("pointerleave", () => this.options.link.cursor.point(null, this));
    addCopyButton(figure);
    new ResizeObserver(() => this.#resize()).observe(this.plot);
    drawInTheme(() => this.#rebuild());
  }

  /** Replaces the series, for charts whose series the viewer chooses. */
  setSeries(series) {
    this.series = series;
    this.values = [[], ...series.map(() => [])];
    this.legend.replaceChildren(
      ...series.map((one) => element("li", { title: one.hint }, swatchOf(one), one.label, element("b"))),
      ...(this.options.legendExtras?.() ?? []),
    );
    this.#rebuild();
  }

  /**
   * Shows x values and one list per series. If there is nothing to show, `sentence` says why and what to do.
   * @param {string} description the text alternative that screen readers read
   */
  update(values, description, sentence = "") {
    this.values = values;
    explain(this.note, sentence);
    this.plot.toggleAttribute("data-empty", sentence !== "");
    this.plot.setAttribute("aria-label", sentence || description);
    this.uplot?.setData(this.#stack());
    this.#showValues(null);
  }

  /** Takes the range of x values again, after it has been chosen. */
  rescale() {
    this.uplot?.setData(this.uplot.data);
  }

  /** Shows the cursor where another chart is pointed at. */
  showCursor(shared) {
    if (this.uplot === undefined) return;
    const x = shared === null ? null : this.options.link.from(shared, this.values[0]);
    const left = x === null ? -10 : this.uplot.valToPos(x, "x");
    this.isFollowing = true;
    this.uplot.setCursor({ left: left >= 0 && left <= this.uplot.over.clientWidth ? left : -10, top: 0 });
    this.isFollowing = false;
  }

  /** Returns where the plot is within its element, in CSS pixels, and the times at its edges. */
  #area() {
    const { uplot } = this;
    if (uplot === undefined || this.plot.hasAttribute("data-empty")) return null;
    const { offsetLeft, offsetTop, clientWidth, clientHeight } = uplot.over;
    return { left: offsetLeft, top: offsetTop, width: clientWidth, height: clientHeight, since: uplot.scales.x.min, until: uplot.scales.x.max };
  }

  #pointed(u) {
    this.#showValues(u.cursor.idx ?? null);
    const { link } = this.options;
    if (this.isFollowing) return;
    // New numbers move the cursor of every chart, so only the chart under the pointer speaks for all.
    if (u.cursor.left >= 0 && u.over.matches(":hover")) link.cursor.point(link.to(u.posToVal(u.cursor.left, "x"), this.values[0]), this);
  }

  #selected(u) {
    const { left, width } = u.select;
    if (width === 0) return;
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    const [from, to] = [left, left + width].map((x) => this.options.link.to(u.posToVal(x, "x"), this.values[0]));
    if (from !== null && to !== null && to > from) this.options.link.select(from, to);
  }

  #isStacked(one) {
    return this.options.stacked && one.kind !== "line";
  }

  #stack() {
    const [x, ...lists] = this.values;
    const sums = new Array(x.length).fill(0);
    return [x, ...lists.map((list, s) => (this.#isStacked(this.series[s]) ? list.map((value, i) => (sums[i] += value ?? 0)) : list))];
  }

  #showValues(index) {
    if (!this.options.hasLegend) return;
    const [x, ...lists] = this.values;
    const at = index ?? x.length - 1;
    this.series.forEach((_, i) => setText(this.legend.children[i].lastChild, at >= 0 ? this.options.format(lists[i]?.[at] ?? null) : ""));
  }

  #resize() {
    const width = this.plot.clientWidth;
    if (width === 0) return;
    if (this.uplot === undefined) this.#rebuild();
    else if (this.uplot.width !== width) this.uplot.setSize({ width, height: this.options.height });
  }

  #rebuild() {
    this.uplot?.destroy();
    this.uplot = undefined;
    const width = this.plot.clientWidth;
    if (width === 0) return; // the observer calls again once there is room
    this.uplot = new uPlot(this.#configuration(width), this.#stack(), this.plot);
  }

  #configuration(width) {
    const { options, series } = this;
    const isTime = options.x === "time";
    const axis = { stroke: colour("faint"), font: FONT, labelFont: FONT, grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false }, border: { show: false } };
    // Bands are drawn from the top of the stack down; each band covers the lower part of the one drawn before it.
    const bands = series.flatMap((one, i) => (i > 0 && this.#isStacked(one) ? [{ series: [i + 1, i] }] : []));
    return {
      width,
      height: options.height,
      padding: [10, isTime ? 28 : 14, 0, 0], // half a label of the last tick
      legend: { show: false },
      cursor: { y: false, drag: { x: true, y: false, setScale: false, dist: 5 }, points: { show: false } },
      scales: {
        x: { time: false, range: (_, min, max) => this.#horizontal(min, max) },
        y: { range: (_, min, max) => this.#range(min, max) },
      },
      axes: [
        { ...axis, label: isTime ? "time of day" : options.x, labelSize: 18, size: 24, gap: 6, space: isTime ? 84 : 56, incrs: isTime ? TIME_STEPS_S : [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 1e5], grid: { show: false }, values: (_, splits) => splits.map((value) => (isTime ? clock(value) : value.toLocaleString("en"))) },
        { ...axis, gap: 8, space: 34, size: fitted, ...(options.isBytes ? { incrs: BYTE_STEPS } : {}), values: (_, splits) => splits.map((value) => rounded(options.format(value))) },
      ],
      bands,
      series: [{}, ...series.map((one) => this.#seriesOf(one))],
      hooks: {
        setCursor: [(u) => this.#pointed(u)],
        setSelect: [(u) => this.#selected(u)],
        draw: [(u) => options.draw?.(u), () => this.marks?.place()],
      },
    };
  }

  #horizontal(min, max) {
    const wanted = this.options.xRange?.();
    if (wanted) return wanted;
    if (min === max) return [min - 1, max + 1];
    return this.series[0]?.kind === "bars" ? [min - 0.6, max + 0.6] : [min, max];
  }

  #range(min, max) {
    const top = max === null || max === undefined ? 1 : max;
    if (this.options.fitsBelow && min !== null && min !== undefined) {
      const room = Math.max((top - min) * 0.12, Math.abs(top) * 0.02, 1e-6);
      return [min - room, top + room];
    }
    const wanted = this.options.top ? this.options.top(top) : top;
    return [0, wanted > 0 ? wanted * 1.06 : 1];
  }

  #seriesOf(one) {
    const line = { stroke: colour(one.colour), width: 1.75, dash: one.dash, points: { show: false }, spanGaps: true };
    if (one.kind === "line") return line;
    if (one.kind === "bars") return { ...line, width: 0, fill: colour(one.colour), paths: uPlot.paths.bars({ size: [0.72, 28], align: 0 }) };
    return { ...line, width: 1, fill: translucent(one.colour, 0.72) };
  }
}

/** Returns the mark of a series in a legend: a square, or a line as it is drawn. */
export function swatchOf({ colour: name, kind, dash = [] }) {
  const stroke = dash.length > 2 || dash[0] > 2 ? "dashed" : dash.length > 0 ? "dotted" : "";
  const swatch = element("span", { class: `swatch ${kind === "line" ? "line" : ""} ${stroke}`, "aria-hidden": "true" });
  swatch.style[kind === "line" ? "borderColor" : "background"] = `var(--${name})`;
  return swatch;
}

/** Formats a tick. Ticks are round numbers, so "64 MiB" is enough where "64.0 MiB" would be the exact form. */
function rounded(text) {
  return text.replace(/\.(\d*?)0+(?=\D|$)/, (_, digits) => (digits ? `.${digits}` : ""));
}

/** Returns the width that the widest label of an axis needs, so that no label is clipped. */
function fitted(u, labels, index, cycle) {
  const axis = u.axes[index];
  if (cycle > 1) return axis._size; // else the size goes back and forth
  const widest = (labels ?? []).reduce((longest, label) => (label.length > longest.length ? label : longest), "");
  u.ctx.font = axis.font[0];
  return Math.ceil(axis.gap + 4 + u.ctx.measureText(widest).width / devicePixelRatio);
}
