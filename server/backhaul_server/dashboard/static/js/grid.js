// A heat map with a row per worker and a column per interval of time: one look at all workers.

import { colour, drawInTheme } from "./colour.js";
import { CursorLine, selectByDragging, timeCursor } from "./cursor.js";
import { element, explain, setAttribute, speak } from "./dom.js";
import { clock, date, percent } from "./format.js";
import { MarkLayer } from "./marks.js";
import { chooseRange } from "./range.js";
import { drawTimes } from "./ticks.js";
import { hideTip, showTip } from "./tip.js";

const EDGE = { right: 12, top: 18, bottom: 26 }; // on top there is room for the marks of events
const FEWEST_ROWS = 4; // have room for a sentence where there is nothing to show
const ROWS = { highest: 24, lowest: 9, wanted: 620 };
const GLYPHS = { serving: "●", draining: "▲", unreachable: "✕" };
const GLYPH_COLOURS = { serving: "good", draining: "warn", unreachable: "bad" };

export class GridMap {
  /**
   * @param {HTMLElement} figure receives the map
   * @param {string} field of a worker, with a share from 0 to 1 or null for each time
   * @param {(address: string) => void} onPick called with the worker whose row was clicked
   */
  constructor(figure, field, onPick) {
    this.field = field;
    this.onPick = onPick;
    this.title = figure.querySelector("figcaption").textContent;
    this.fleet = null;
    this.cursor = null; // [column, row] of the cell that is pointed at
    this.canvas = element("canvas", { tabindex: "0", role: "application", "aria-roledescription": "heat map", "aria-label": this.title });
    this.canvas.style.width = "100%";
    this.note = element("p", { class: "empty", hidden: "" });
    this.plot = element("div", { class: "plot grid-plot" }, this.canvas, this.note);
    this.scale = element("canvas", { "aria-hidden": "true" });
    this.scale.width = 96;
    this.scale.height = 10;
    figure.append(element("ul", { class: "legend" }, element("li", {}, element("b", {}, "0 %"), this.scale, element("b", {}, "100 %")), element("li", {}, "no cell: no answer")), this.plot);
    this.line = new CursorLine(this.plot);
    this.marks = new MarkLayer(this.plot, () => this.#marked());
    timeCursor.add(this);
    selectByDragging(this.plot, this.canvas, (from, to) => {
      this.wasDragged = true;
      const times = this.#times();
      if (times) chooseRange(...[from, to].map((x) => times.since + ((x - times.left) / times.width) * (times.until - times.since)));
    });
    new ResizeObserver(() => this.draw()).observe(this.plot);
    drawInTheme(() => this.draw());
    this.#listen();
  }

  update(fleet, sentence) {
    this.fleet = fleet;
    explain(this.note, sentence);
    this.plot.toggleAttribute("data-empty", sentence !== "");
    this.rowHeight = Math.max(ROWS.lowest, Math.min(ROWS.highest, Math.floor(ROWS.wanted / Math.max(1, fleet.workers.length))));
    this.height = EDGE.top + Math.max(sentence ? FEWEST_ROWS : 1, fleet.workers.length) * this.rowHeight + EDGE.bottom;
    this.canvas.style.height = `${this.height}px`;
    const answering = fleet.workers.filter((worker) => worker.state !== "unreachable");
    const now = answering.map((worker) => worker[this.field].at(-1)).filter((share) => share !== null && share !== undefined);
    const mean = now.length ? now.reduce((sum, share) => sum + share, 0) / now.length : null;
    const most = now.length ? Math.max(...now) : null;
    const missing = fleet.workers.length - answering.length;
    const without = missing > 0 ? `, without the ${missing} that ${missing === 1 ? "is" : "are"} unreachable` : "";
    setAttribute(this.canvas, "aria-label", sentence || `${this.title} of ${fleet.workers.length} workers: now ${percent(mean)} in the mean, ${percent(most)} at most${without}. Arrow keys read cells, Enter shows the worker.`);
    this.draw();
  }

  #gutter() {
    return this.canvas.clientWidth < 480 ? 92 : 138;
  }

  #area() {
    const left = this.#gutter();
    return { left, top: EDGE.top, width: this.canvas.clientWidth - left - EDGE.right, height: this.fleet.workers.length * this.rowHeight };
  }

  #times() {
    if (this.fleet === null || this.fleet.at_s.length < 2 || this.canvas.clientWidth === 0) return null;
    const { at_s: at } = this.fleet;
    const { left, width, height } = this.#area();
    return { left, top: EDGE.top, width, height, since: at[0], until: at.at(-1) + (at[1] - at[0]) };
  }

  /** Returns where events are marked: from above the first row down. */
  #marked() {
    const times = this.#times();
    return times && { ...times, top: 2, height: times.height + EDGE.top - 2 };
  }

  showCursor(atS) {
    const times = this.#times();
    const isInside = times !== null && atS !== null && atS >= times.since && atS <= times.until;
    this.line.place(isInside ? atS : null, times);
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (width === 0 || this.fleet === null) return;
    const ratio = devicePixelRatio;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    this.#drawScale();
    this.#drawCells(context);
    this.#drawLabels(context);
    this.#drawTimes(context);
    this.marks.place();
  }

  #drawCells(context) {
    const { left, top, width } = this.#area();
    const cell = width / Math.max(1, this.fleet.at_s.length);
    const gap = cell > 5 ? 1 : 0;
    const shades = Array.from({ length: 101 }, (_, i) => shade(i / 100));
    const blank = colour("raised");
    this.fleet.workers.forEach((worker, row) => {
      const y = top + row * this.rowHeight;
      context.fillStyle = blank;
      context.fillRect(left, y, width, this.rowHeight - 1);
      worker[this.field].forEach((share, column) => {
        if (share === null) return;
        context.fillStyle = shades[Math.round(100 * Math.min(1, Math.max(0, share)))];
        context.fillRect(left + column * cell, y, Math.max(1, Math.ceil(cell) - gap), this.rowHeight - 1);
      });
    });
    this.#drawAges(context, cell);
    if (this.cursor === null) return;
    context.strokeStyle = colour("ink");
    context.lineWidth = 1.5;
    context.strokeRect(left + this.cursor[0] * cell, top + this.cursor[1] * this.rowHeight - 0.5, Math.max(3, cell), this.rowHeight);
  }

  /** Writes when an unreachable worker last answered where its row has no cells up to now, if there is room. */
  #drawAges(context, cell) {
    const { left, top, width } = this.#area();
    const until = this.#times()?.until ?? Infinity;
    context.font = `${Math.min(11.5, this.rowHeight - 1)}px Inter, system-ui, sans-serif`;
    context.fillStyle = colour("faint");
    context.textAlign = "right";
    context.textBaseline = "middle";
    this.fleet.workers.forEach((worker, row) => {
      const text = worker.seen_at_s <= until ? lastAnswer(worker) : "";
      const blank = worker[this.field].length - 1 - worker[this.field].findLastIndex((share) => share !== null);
      const room = blank * cell - 12;
      if (text && context.measureText(text).width <= room) context.fillText(text, left + width - 6, top + (row + 0.5) * this.rowHeight);
    });
  }

  #drawLabels(context) {
    const { left, top } = this.#area();
    const size = Math.min(12, this.rowHeight - 1);
    context.textBaseline = "middle";
    this.fleet.workers.forEach((worker, row) => {
      const y = top + (row + 0.5) * this.rowHeight;
      const isPointed = this.cursor?.[1] === row;
      context.font = `${isPointed ? "600 " : ""}${size}px Inter, system-ui, sans-serif`;
      context.fillStyle = colour(GLYPH_COLOURS[worker.state]);
      context.textAlign = "left";
      context.fillText(GLYPHS[worker.state], 0, y);
      context.fillStyle = colour(worker.state === "serving" ? "ink" : GLYPH_COLOURS[worker.state]);
      context.fillText(fitting(context, worker.address, left - 22), 14, y);
    });
  }

  #drawTimes(context) {
    const times = this.#times();
    if (times === null) return;
    context.font = "11.5px Inter, system-ui, sans-serif";
    context.fillStyle = colour("faint");
    drawTimes(context, { ...times, bottom: times.top + times.height }, this.canvas.clientWidth);
  }

  #drawScale() {
    const context = this.scale.getContext("2d");
    context.clearRect(0, 0, this.scale.width, this.scale.height); // shades are transparent, and would add up
    for (let x = 0; x < this.scale.width; x += 1) {
      context.fillStyle = shade(x / this.scale.width);
      context.fillRect(x, 0, 1, this.scale.height);
    }
  }

  #text() {
    const [column, row] = this.cursor;
    const worker = this.fleet.workers[row];
    const share = worker[this.field][column];
    const state = [worker.state, lastAnswer(worker)].filter(Boolean).join(", ");
    return `${worker.address} (${state})\n${clock(this.fleet.at_s[column])}: ${share === null ? "no answer" : percent(share)}`;
  }

  #listen() {
    const { canvas } = this;
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => {
      this.cursor = null;
      timeCursor.point(null, this);
      hideTip();
      this.draw();
    });
    canvas.addEventListener("click", (event) => {
      const wasDragged = this.wasDragged;
      this.wasDragged = false;
      const worker = this.fleet?.workers[Math.floor((event.offsetY - EDGE.top) / this.rowHeight)];
      if (worker && !wasDragged) this.onPick(worker.address);
    });
    canvas.addEventListener("keydown", (event) => this.#step(event));
  }

  #point(event) {
    const times = this.#times();
    if (times === null) return;
    const column = Math.floor(((event.offsetX - times.left) / times.width) * this.fleet.at_s.length);
    const row = Math.floor((event.offsetY - times.top) / this.rowHeight);
    const isInside = row >= 0 && row < this.fleet.workers.length && column >= 0 && column < this.fleet.at_s.length;
    this.cursor = isInside ? [column, row] : null;
    timeCursor.point(isInside ? times.since + ((event.offsetX - times.left) / times.width) * (times.until - times.since) : null, this);
    if (isInside) showTip(event, this.#text());
    else hideTip();
    this.draw();
  }

  #step(event) {
    if (this.fleet === null || this.fleet.workers.length === 0) return;
    const [column, row] = this.cursor ?? [this.fleet.at_s.length, 0];
    if (event.key === "Enter") {
      this.onPick(this.fleet.workers[row].address);
      return;
    }
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    const clamp = (value, high) => Math.min(high, Math.max(0, value));
    this.cursor = [clamp(column + move[0], this.fleet.at_s.length - 1), clamp(row + move[1], this.fleet.workers.length - 1)];
    speak(this.#text());
    this.draw();
  }
}

/** Returns when a worker that is unreachable last answered; "" for any other worker. */
function lastAnswer(worker) {
  if (worker.state !== "unreachable") return "";
  return worker.seen_at_s === 0 ? "never answered" : `last answer ${date(worker.seen_at_s, true)}`;
}

/** Returns the text, or its end if it is wider than this many pixels. */
function fitting(context, text, width) {
  let shown = text;
  while (shown.length > 4 && context.measureText(shown).width > width) shown = `…${shown.slice(shown.startsWith("…") ? 2 : 1)}`;
  return shown;
}

/** Returns a shade of the page's blue for a share. One hue is enough: the lightness shows the share. */
function shade(share) {
  return colour("blue").replace(/^rgb\((.*)\)$/, `rgba($1, ${(0.06 + 0.94 * share).toFixed(3)})`);
}
