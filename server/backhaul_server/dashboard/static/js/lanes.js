// The lanes of the timeline: which part of it is visible, and which bar is at a position or next to another.

import { milliseconds } from "./format.js";
import { FOOT, layOut, microBatchesOf } from "./lanes_layout.js";
import { GUTTER, paintLanes, RIGHT } from "./lanes_paint.js";

const SHORTEST_MS = 0.5;

export class Lanes {
  /**
   * @param {HTMLCanvasElement} canvas is drawn on
   * @param {(run: object) => string} titleOf returns the line above the lanes of a run, where there are several
   * @param {() => void} onDraw called after each drawing
   */
  constructor(canvas, titleOf, onDraw) {
    this.canvas = canvas;
    this.titleOf = titleOf;
    this.onDraw = onDraw;
    this.timeline = null;
    this.byMicroBatch = false;
    this.layout = { rows: [], heads: [], workers: [], rowHeight: 0, height: 0 };
    this.view = { start: 0, end: 1 }; // in milliseconds since the start of the timeline
    this.picked = null; // a span
    this.pointed = null;
  }

  /** Shows a timeline, all of it. */
  show(timeline) {
    this.timeline = timeline;
    this.pointed = null;
    this.picked = null;
    this.fit();
    this.#layOut();
  }

  fit() {
    this.view = { start: 0, end: Math.max(SHORTEST_MS, this.timeline?.duration_ms ?? 1) };
  }

  /** Groups bars by micro-batch instead of by phase, if there are any. */
  groupByMicroBatch(isWanted) {
    this.byMicroBatch = isWanted;
    if (this.timeline !== null) this.#layOut();
  }

  #layOut() {
    this.layout = layOut(this.timeline, this.byMicroBatch, this.titleOf);
    this.canvas.style.height = `${this.layout.height}px`;
    this.draw();
  }

  get workers() {
    return this.layout.workers;
  }

  /** Whether rows say whose they are. */
  get namesWorkers() {
    return this.workers.length > 1 || (this.byMicroBatch && microBatchesOf(this.timeline).length > 0);
  }

  /** Returns where the bars are on the canvas, in pixels, and the visible times in seconds since 1970. */
  area() {
    if (this.timeline === null || this.timeline.steps.length === 0) return null;
    const begins = this.timeline.begins_at_s;
    return { left: GUTTER, top: 0, width: this.scale().width, height: this.layout.height - FOOT + 4, since: begins + this.view.start / 1000, until: begins + this.view.end / 1000 };
  }

  /** Returns the width of the bars' part in pixels, and its pixels per millisecond. */
  scale() {
    const width = this.canvas.clientWidth - GUTTER - RIGHT;
    return { width, perMs: width / (this.view.end - this.view.start) };
  }

  /** Returns the position of a time, in pixels from the left. */
  x(ms) {
    return GUTTER + (ms - this.view.start) * this.scale().perMs;
  }

  /** Zooms by a factor around a position, in pixels from the left, or around the middle. */
  zoom(factor, x = null) {
    const { start, end } = this.view;
    const share = x === null ? 0.5 : Math.min(1, Math.max(0, (x - GUTTER) / this.scale().width));
    const length = Math.min(this.timeline.duration_ms, Math.max(SHORTEST_MS, (end - start) / factor));
    this.#moveTo(start + (end - start - length) * share, length);
  }

  /** Zooms to what is between two positions, in pixels from the left. */
  zoomTo(left, right) {
    const [from, to] = [left, right].map((x) => this.view.start + (Math.max(GUTTER, x) - GUTTER) / this.scale().perMs);
    this.#moveTo(from, Math.max(SHORTEST_MS, to - from));
  }

  /** Moves the view by this number of pixels. */
  pan(pixels) {
    this.#moveTo(this.view.start + pixels / this.scale().perMs, this.view.end - this.view.start);
  }

  #moveTo(start, length) {
    const first = Math.max(0, Math.min(start, this.timeline.duration_ms - length));
    this.view = { start: first, end: first + length };
    this.draw();
  }

  /** Returns the bar at a position of the canvas, null if there is none. */
  at(x, y) {
    const row = this.layout.rows.find((one) => y >= one.y && y < one.y + this.layout.rowHeight);
    if (!row || x < GUTTER) return null;
    const ms = this.view.start + (x - GUTTER) / this.scale().perMs;
    const slack = 1.5 / this.scale().perMs; // thin bars can be hit too
    const near = row.bars.filter((bar) => ms >= bar.start_ms - slack && ms <= bar.start_ms + bar.duration_ms + slack);
    return near.find((bar) => ms >= bar.start_ms && ms <= bar.start_ms + bar.duration_ms) ?? near[0] ?? null;
  }

  /** Returns the bar that an arrow key selects, starting from the picked bar; the first bar if none is picked. */
  neighbour(key) {
    const filled = this.layout.rows.filter((row) => row.bars.length > 0);
    if (filled.length === 0) return null;
    const r = filled.findIndex((row) => row.bars.includes(this.picked));
    if (r < 0) return filled[0].bars[0];
    const i = filled[r].bars.indexOf(this.picked);
    if (key === "ArrowLeft") return filled[r].bars[Math.max(0, i - 1)];
    if (key === "ArrowRight") return filled[r].bars[Math.min(filled[r].bars.length - 1, i + 1)];
    const other = filled[r + (key === "ArrowUp" ? -1 : 1)] ?? filled[r];
    const middle = (bar) => bar.start_ms + bar.duration_ms / 2;
    const distance = (bar) => Math.abs(middle(bar) - middle(this.picked));
    return other.bars.reduce((best, bar) => (distance(bar) < distance(best) ? bar : best));
  }

  /** Moves the view so that it shows a bar. */
  reveal(bar) {
    const length = this.view.end - this.view.start;
    if (bar.start_ms < this.view.start || bar.start_ms + Math.min(bar.duration_ms, length) > this.view.end) {
      this.#moveTo(bar.start_ms + bar.duration_ms / 2 - length / 2, length);
    }
  }

  draw() {
    const { canvas } = this;
    if (canvas.clientWidth === 0 || this.timeline === null) return;
    const ratio = devicePixelRatio;
    canvas.width = Math.round(canvas.clientWidth * ratio);
    canvas.height = Math.round(this.layout.height * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    paintLanes(context, this);
    this.onDraw();
  }
}

/** Describes a bar in words. */
export function describe(bar) {
  return `${bar.segment}\n${bar.lane}${bar.worker ? ` on ${bar.worker}` : ""}: ${milliseconds(bar.duration_ms)}, from ${milliseconds(bar.start_ms)}`;
}
