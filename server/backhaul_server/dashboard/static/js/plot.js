// What the charts of the page have in common: a plot by uPlot with its axes and the marks of events, a legend, a sentence in
// place of an empty plot, a button that copies the figure, a cursor that charts share, and choosing a part by dragging.

import { colour, drawInTheme } from "./colour.js";
import { addCopyButton } from "./copy.js";
import { element, explain, setText } from "./dom.js";
import { clock } from "./format.js";
import { overTime } from "./link.js";
import { MarkLayer } from "./marks.js";

const FONT = '11.5px "Inter", system-ui, sans-serif';
const MOUSE = { pointerdown: "mousedown", pointermove: "mousemove", pointerup: "mouseup", pointercancel: "mouseup" };

/** The axis of a chart over time. */
export const TIME_AXIS = {
  label: "time of day",
  labelSize: 18,
  size: 24,
  gap: 6,
  space: 84,
  incrs: [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 43_200, 86_400],
  grid: { show: false },
  values: (_, splits) => splits.map((atS) => clock(atS)),
};

/**
 * A plot in a figure. A subclass has `data()`: x values and a list for each series; and `configuration()`: its `axes`, `series`
 * and other options of uPlot. It may have `paint(context, area)`: draws on top, in CSS pixels; `pointed(cursor)`: takes
 * uPlot's cursor while the pointer is over the plot, then null; `moved(index)`: takes the index of the x value at the cursor,
 * this plot's own or a shared one, or null.
 */
export class Plot {
  roomAbove = 0; // pixels above the plot that marks of events may take
  isPointed = false;
  isFollowing = false;

  /**
   * @param {HTMLElement} figure receives the legend and the plot
   * @param {{height?: number, link?: object, attributes?: object}} options the height in pixels; how the plot takes part in a
   *   shared cursor and in zooming, see link.js; and attributes of the element that holds the plot
   */
  constructor(figure, { height = 220, link = overTime, attributes = {} }) {
    this.figure = figure;
    this.height = height;
    this.link = link;
    this.note = element("p", { class: "empty", hidden: "" });
    this.legend = element("ul", { class: "legend" });
    this.plot = element("div", { class: "plot", role: "img", "aria-label": this.caption, ...attributes }, this.note);
    figure.append(this.legend, this.plot);
    addCopyButton(figure);
    if (link.isTimed) this.marks = new MarkLayer(this.plot, () => this.#marked());
    link.cursor.add(this);
    // uPlot listens to the mouse only: a finger that moves sideways selects a part too.
    for (const [pointer, mouse] of Object.entries(MOUSE)) {
      this.plot.addEventListener(pointer, (event) => {
        if (event.pointerType === "touch") this.uplot?.over.dispatchEvent(new MouseEvent(mouse, event));
      });
    }
    new ResizeObserver(() => this.#fit()).observe(this.plot);
    drawInTheme(() => this.rebuild());
  }

  get caption() {
    return this.figure.querySelector("figcaption").textContent;
  }

  set caption(text) {
    setText(this.figure.querySelector("figcaption"), text);
  }

  /** Describes the plot to screen readers; if there is nothing to show, `sentence` says why and what to do. */
  describe(description, sentence) {
    explain(this.note, sentence);
    this.plot.toggleAttribute("data-empty", sentence !== "");
    this.plot.setAttribute("aria-label", sentence || description);
  }

  /** Draws what is shown now, in its present range and height. */
  draw() {
    this.#fit();
    this.uplot?.setData(this.data());
  }

  /** Builds the plot anew, in the present colours and with the present series. */
  rebuild() {
    this.uplot?.destroy();
    this.uplot = undefined;
    const width = this.plot.clientWidth;
    if (width === 0) return; // the observer calls again once there is room
    this.uplot = new uPlot(this.#configuration(width), this.data(), this.plot);
  }

  #fit() {
    this.plot.style.minHeight = `${this.height}px`;
    const width = this.plot.clientWidth;
    if (width === 0) return;
    if (this.uplot === undefined) this.rebuild();
    else if (this.uplot.width !== width || this.uplot.height !== this.height) this.uplot.setSize({ width, height: this.height });
  }

  /** Returns where the plot is within its element, in CSS pixels, and the shared values at its edges; null if it is empty. */
  area() {
    const { uplot } = this;
    if (!uplot?.data[0].length || this.plot.hasAttribute("data-empty")) return null;
    const { offsetLeft, offsetTop, clientWidth, clientHeight } = uplot.over;
    const [since, until] = [uplot.scales.x.min, uplot.scales.x.max].map((x) => this.#shared(x));
    return { left: offsetLeft, top: offsetTop, width: clientWidth, height: clientHeight, since, until };
  }

  #marked() {
    const area = this.area();
    return area && { ...area, top: area.top - this.roomAbove, height: area.height + this.roomAbove };
  }

  /** Shows the cursor where another chart is pointed at. */
  showCursor(shared) {
    if (this.uplot === undefined) return;
    const x = shared === null ? null : this.link.from(shared, this.uplot.data[0]);
    const left = x === null ? -10 : this.uplot.valToPos(x, "x");
    this.isFollowing = true;
    this.uplot.setCursor({ left: left >= 0 && left <= this.uplot.over.clientWidth ? left : -10, top: 0 });
    this.isFollowing = false;
  }

  #shared(x) {
    return this.link.to(x, this.uplot.data[0]);
  }

  #pointed(u) {
    this.moved?.(u.cursor.idx ?? null);
    // New numbers move the cursor of every chart, so only the chart under the pointer speaks for all.
    const isPointed = u.cursor.left >= 0 && u.over.matches(":hover") && this.area() !== null;
    if (this.isFollowing || !(isPointed || this.isPointed)) return;
    this.isPointed = isPointed;
    this.link.cursor.point(isPointed ? this.#shared(u.posToVal(u.cursor.left, "x")) : null, this);
    this.pointed?.(isPointed ? u.cursor : null);
  }

  #selected(u) {
    const { left, width } = u.select;
    if (width === 0) return;
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    const [from, to] = [left, left + width].map((x) => this.#shared(u.posToVal(x, "x")));
    if (from !== null && to !== null && to > from) this.link.select(from, to);
  }

  #paint({ ctx }) {
    const area = this.area();
    if (area === null || this.paint === undefined) return;
    ctx.save();
    ctx.scale(devicePixelRatio, devicePixelRatio);
    this.paint(ctx, area);
    ctx.restore();
  }

  #configuration(width) {
    const { axes, series, ...options } = this.configuration();
    const axis = { stroke: colour("faint"), font: FONT, labelFont: FONT, grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false }, border: { show: false } };
    return {
      width,
      height: this.height,
      padding: [10, 28, 0, 0], // on the right half a label of the last tick
      legend: { show: false },
      cursor: { y: false, drag: { x: true, y: false, setScale: false, dist: 5 }, points: { show: false } },
      hooks: {
        setCursor: [(u) => this.#pointed(u)],
        setSelect: [(u) => this.#selected(u)],
        draw: [(u) => this.#paint(u), () => this.marks?.place()],
      },
      ...options,
      axes: axes.map((one) => ({ ...axis, ...one })),
      series: [{}, ...series],
    };
  }
}
