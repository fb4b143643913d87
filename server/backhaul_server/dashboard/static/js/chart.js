// Charts of areas, lines and bars.

import { colour, translucent } from "./colour.js";
import { element, setText } from "./dom.js";
import { bytes } from "./format.js";
import { overTime } from "./link.js";
import { Plot, TIME_AXIS } from "./plot.js";
import { fixedRange } from "./range.js";

const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500];
const BYTE_STEPS = [0, 1, 2, 3, 4, 5].flatMap((power) => STEPS.map((count) => count * 1024 ** power));

/**
 * A chart in a figure.
 *
 * @param {HTMLElement} figure receives the legend and the plot
 * @param {object} options
 *   `series`: [{label, hint?, colour, dash?, kind: "area" | "line" | "bars"}], from the bottom of a stack to its top;
 *   `stacked`: whether areas and bars are stacked; lines never are;
 *   `isBytes`: values are bytes, and ticks round numbers of KiB, MiB and so on; `format`: formats any other value;
 *   `x`: "time", with events marked and the range of the page, or the label of the x axis;
 *   `height`; `hasLegend`; `top(max)`: returns the upper end of the scale, given the largest value;
 *   `paint(context, area, chart)`: draws more on top, in CSS pixels;
 *   `link`: how a chart not over time takes part in a shared cursor and in zooming, see link.js;
 *   `xRange()`: returns the [first, last] x values to show, or null for all.
 */
export class Chart extends Plot {
  constructor(figure, options) {
    super(figure, options);
    this.options = { format: bytes, ...(this.link === overTime ? { xRange: fixedRange } : {}), ...options };
    this.legend.hidden = options.hasLegend === false;
    this.setSeries(options.series ?? []);
  }

  /** Replaces the series, for charts whose series the viewer chooses. */
  setSeries(series) {
    this.series = series;
    this.values = [[], ...series.map(() => [])];
    this.legend.replaceChildren(
      ...series.map((one) => element("li", { title: one.hint }, swatchOf(one), one.label, element("b"))),
      ...(this.options.legendExtras?.() ?? []),
    );
    this.rebuild();
  }

  /**
   * Shows x values and one list per series. If there is nothing to show, `sentence` says why and what to do.
   * @param {string} description the text alternative that screen readers read
   */
  update(values, description, sentence = "") {
    this.values = values;
    this.describe(description, sentence);
    this.draw();
    this.moved(null);
  }

  #isStacked(one) {
    return this.options.stacked && one.kind !== "line";
  }

  data() {
    const [x, ...lists] = this.values;
    const sums = new Array(x.length).fill(0);
    return [x, ...lists.map((list, s) => (this.#isStacked(this.series[s]) ? list.map((value, i) => (sums[i] += value ?? 0)) : list))];
  }

  /** Shows the values at an index in the legend, or the last ones. */
  moved(index) {
    const [x, ...lists] = this.values;
    const at = index ?? x.length - 1;
    this.series.forEach((_, i) => setText(this.legend.children[i].lastChild, at >= 0 ? this.options.format(lists[i]?.[at] ?? null) : ""));
  }

  paint(context, area) {
    this.options.paint?.(context, area, this);
  }

  configuration() {
    const { options, series } = this;
    const steps = { ...TIME_AXIS, label: options.x, space: 56, incrs: [...STEPS, 1000, 2000, 5000, 1e4, 1e5], values: (_, splits) => splits.map((value) => value.toLocaleString("en")) };
    return {
      scales: {
        x: { time: false, range: (_, min, max) => this.#horizontal(min, max) },
        y: { range: (_, min, max) => this.#range(min, max) },
      },
      axes: [
        options.x === "time" ? TIME_AXIS : steps,
        { gap: 8, space: 34, size: fitted, ...(options.isBytes ? { incrs: BYTE_STEPS } : {}), values: (_, splits) => splits.map((value) => rounded(options.format(value))) },
      ],
      // Bands are drawn from the top of the stack down; each band covers the lower part of the one drawn before it.
      bands: series.flatMap((one, i) => (i > 0 && this.#isStacked(one) ? [{ series: [i + 1, i] }] : [])),
      series: series.map((one) => this.#seriesOf(one)),
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
