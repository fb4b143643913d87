// A heat map of call durations over time, with a logarithmic scale of durations.

import { colour, drawInTheme } from "./colour.js";
import { CursorLine, selectByDragging, timeCursor } from "./cursor.js";
import { byId, element, explain, setText, speak } from "./dom.js";
import { clock, count, milliseconds } from "./format.js";
import { MarkLayer } from "./marks.js";
import { chooseRange, fixedRange } from "./range.js";
import { drawTimes } from "./ticks.js";
import { hideTip, showTip } from "./tip.js";

const HEIGHT = 300;
const FEWEST_COLUMNS = 15;
const FEWEST_ROWS = 8;
const EDGE = { left: 58, right: 14, top: 18, bottom: 44 }; // on top there is room for the marks of events
const TICKS_MS = [0.1, 1, 10, 100, 1000, 10000, 100000];

class HeatMap {
  constructor(figure) {
    this.figure = figure;
    this.heat = null;
    this.cursor = null; // [column, row] of the cell that is pointed at
    this.canvas = element("canvas", { tabindex: "0", role: "img", "aria-label": figure.querySelector("figcaption").textContent });
    this.canvas.style.height = `${HEIGHT}px`;
    this.canvas.style.width = "100%";
    this.plot = element("div", { class: "plot" });
    this.note = element("p", { class: "empty", hidden: "" });
    this.scale = element("canvas", { "aria-hidden": "true" });
    this.scale.width = 96;
    this.scale.height = 10;
    this.most = element("b");
    const legend = element("ul", { class: "legend" }, element("li", {}, "calls: ", element("b", {}, "1"), this.scale, this.most));
    this.plot.append(this.canvas, this.note);
    figure.append(legend, this.plot);
    this.line = new CursorLine(this.plot);
    this.marks = new MarkLayer(this.plot, () => this.#times());
    timeCursor.add(this);
    selectByDragging(this.plot, this.canvas, (from, to) => {
      const times = this.#times();
      if (times) chooseRange(...[from, to].map((x) => times.since + ((x - times.left) / times.width) * (times.until - times.since)));
    });
    new ResizeObserver(() => this.draw()).observe(this.plot);
    drawInTheme(() => this.draw());
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => {
      this.cursor = null;
      timeCursor.point(null, this);
      hideTip();
      this.draw();
    });
    this.canvas.addEventListener("keydown", (event) => this.#step(event));
  }

  update(reported, method) {
    const heat = fixedRange() ? reported : recent(reported);
    this.heat = heat;
    const all = heat.counts.flat();
    this.max = Math.max(0, ...all);
    const rows = heat.counts.flatMap((column) => column.flatMap((calls, row) => (calls > 0 ? [row] : [])));
    const first = Math.min(...rows);
    const last = Math.max(...rows);
    // Rows around the occupied ones, so that a single bucket does not fill the map.
    this.first = Math.max(0, first - 1);
    this.last = Math.min(heat.bounds_ms.length, Math.max(last + 1, this.first + FEWEST_ROWS));
    const isEmpty = rows.length === 0;
    explain(this.note, isEmpty ? "No calls in this time range. Once a trainer runs segments, this map shows how long its calls take." : "");
    this.plot.toggleAttribute("data-empty", isEmpty);
    setText(this.figure.querySelector("figcaption"), method ? `Duration of ${method} calls` : "Duration of calls, all RPCs");
    setText(this.most, count(this.max));
    const total = all.reduce((sum, calls) => sum + calls, 0);
    this.canvas.setAttribute(
      "aria-label",
      isEmpty
        ? this.note.textContent
        : `Heat map: ${count(total)} calls between ${milliseconds(this.#lower(first))} and ${milliseconds(this.#upper(last))}. Arrow keys read cells.`,
    );
    this.draw();
  }

  #lower(row) {
    return row === 0 ? 0 : this.heat.bounds_ms[row - 1];
  }

  #upper(row) {
    return this.heat.bounds_ms[row] ?? Infinity;
  }

  /** Returns the place of the map in its element, and the times at its edges; null if it is empty. */
  #times() {
    if (this.heat === null || !this.max) return null;
    const { x, y, width, height } = this.#area();
    return { left: x, top: 2, width, height: height + y - 2, since: this.heat.at_s[0], until: this.heat.at_s.at(-1) + this.heat.interval_s };
  }

  /** Shows the cursor where another chart is pointed at. */
  showCursor(atS) {
    const times = this.#times();
    const isInside = times !== null && atS !== null && atS >= times.since && atS <= times.until;
    this.line.place(isInside ? atS : null, times);
  }

  #area() {
    return { x: EDGE.left, y: EDGE.top, width: this.canvas.clientWidth - EDGE.left - EDGE.right, height: HEIGHT - EDGE.top - EDGE.bottom };
  }

  draw() {
    const { canvas, heat } = this;
    const width = canvas.clientWidth;
    if (width === 0 || heat === null) return;
    const ratio = devicePixelRatio;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(HEIGHT * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "11.5px Inter, system-ui, sans-serif";
    this.#drawScale();
    this.marks.place();
    if (this.max === 0) return;
    const area = this.#area();
    const rows = this.last - this.first + 1;
    const cellWidth = area.width / heat.counts.length;
    const cellHeight = area.height / rows;
    heat.counts.forEach((column, c) => {
      for (let row = this.first; row <= this.last; row += 1) {
        if (!column[row]) continue;
        const y = area.y + (this.last - row) * cellHeight;
        context.fillStyle = shade(this.#strength(column[row]));
        context.fillRect(area.x + c * cellWidth, y, Math.ceil(cellWidth) - (cellWidth > 6 ? 1 : 0), Math.ceil(cellHeight) - (cellHeight > 6 ? 1 : 0));
      }
    });
    this.#drawAxes(context, area, cellHeight);
    if (this.cursor) {
      const [c, row] = this.cursor;
      context.strokeStyle = colour("ink");
      context.lineWidth = 1.5;
      context.strokeRect(area.x + c * cellWidth, area.y + (this.last - row) * cellHeight, cellWidth, cellHeight);
    }
  }

  /** Returns the position of a duration on the scale, in rows. */
  #rowAt(ms) {
    const bounds = this.heat.bounds_ms;
    const row = bounds.findIndex((bound) => bound >= ms);
    if (row < 0) return bounds.length + 1;
    const lower = row > 0 ? bounds[row - 1] : bounds[0] / (bounds[1] / bounds[0]);
    return row + Math.log(ms / lower) / Math.log(bounds[row] / lower);
  }

  #strength(calls) {
    return this.max === 1 ? 1 : Math.log(1 + calls) / Math.log(1 + this.max);
  }

  #drawAxes(context, area, cellHeight) {
    context.fillStyle = colour("faint");
    context.strokeStyle = colour("grid");
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const tick of TICKS_MS) {
      const row = this.#rowAt(tick);
      if (row < this.first || row > this.last + 1) continue;
      const y = area.y + (this.last + 1 - row) * cellHeight;
      context.beginPath();
      context.moveTo(area.x - 4, y);
      context.lineTo(area.x, y);
      context.stroke();
      context.fillText(tick < 1000 ? `${tick} ms` : `${tick / 1000} s`, area.x - 8, y);
    }
    drawTimes(context, { ...this.#times(), bottom: area.y + area.height }, this.canvas.clientWidth);
    context.fillText("time of day", area.x + area.width / 2, area.y + area.height + 26);
  }

  #drawScale() {
    const context = this.scale.getContext("2d");
    context.clearRect(0, 0, this.scale.width, this.scale.height); // shades are transparent, and would add up
    for (let x = 0; x < this.scale.width; x += 1) {
      context.fillStyle = shade(0.12 + (0.88 * x) / this.scale.width);
      context.fillRect(x, 0, 1, this.scale.height);
    }
  }

  #text() {
    const [c, row] = this.cursor;
    const upper = this.#upper(row);
    const range = upper === Infinity ? `over ${milliseconds(this.#lower(row))}` : `${milliseconds(this.#lower(row))} to ${milliseconds(upper)}`;
    const calls = this.heat.counts[c][row];
    return `${clock(this.heat.at_s[c])}\n${range}: ${count(calls)} ${calls === 1 ? "call" : "calls"}`;
  }

  #point(event) {
    if (!this.max) return;
    const area = this.#area();
    const c = Math.floor(((event.offsetX - area.x) / area.width) * this.heat.counts.length);
    const row = this.last - Math.floor(((event.offsetY - area.y) / area.height) * (this.last - this.first + 1));
    const isInside = c >= 0 && c < this.heat.counts.length && row >= this.first && row <= this.last;
    this.cursor = isInside ? [c, row] : null;
    timeCursor.point(isInside ? this.heat.at_s[0] + ((event.offsetX - area.x) / area.width) * this.heat.counts.length * this.heat.interval_s : null, this);
    if (isInside) showTip(event, this.#text());
    else hideTip();
    this.draw();
  }

  #step(event) {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    if (!move || !this.max) return;
    event.preventDefault();
    const [c, row] = this.cursor ?? [this.heat.counts.length, this.first];
    const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
    this.cursor = [clamp(c + move[0], 0, this.heat.counts.length - 1), clamp(row + move[1], this.first, this.last)];
    speak(this.#text());
    this.draw();
  }
}

/** Cuts off the time before the first call, so that the map of a new worker is not mostly empty. */
function recent(heat) {
  const first = heat.counts.findIndex((column) => column.some((calls) => calls > 0));
  const begin = Math.max(0, Math.min(first, heat.counts.length - FEWEST_COLUMNS));
  return { ...heat, at_s: heat.at_s.slice(begin), counts: heat.counts.slice(begin) };
}

/** Returns a shade of the page's blue. One hue is enough: the lightness shows the number of calls. */
function shade(strength) {
  return colour("blue").replace(/^rgb\((.*)\)$/, `rgba($1, ${(0.1 + 0.9 * strength).toFixed(3)})`);
}

export const heatMap = () => new HeatMap(byId("heat"));
