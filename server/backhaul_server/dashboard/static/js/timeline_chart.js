// The chart of the timeline: which part of it is visible, and which bar is at a position or next to another.

import { milliseconds } from "./format.js";
import { layOut, microBatchesOf } from "./timeline_layout.js";
import { GUTTER, paintTimeline } from "./timeline_paint.js";
import { overTime } from "./link.js";
import { Plot, TIME_AXIS } from "./plot.js";
import { hideTip, showTip } from "./tip.js";

const SHORTEST_MS = 0.5;
const EMPTY_HEIGHT = 120;
const AXIS = 42; // pixels below the rows

export class TimelineChart extends Plot {
  timeline = null;
  byMicroBatch = false;
  layout = { rows: [], heads: [], workers: [], rowHeight: 0, height: EMPTY_HEIGHT };
  view = { start: 0, end: 1 }; // in milliseconds since the start of the timeline
  picked = null; // a span
  hovered = null;

  /**
   * @param {HTMLElement} figure receives the chart
   * @param {(run: object) => string} titleOf returns the line above the rows of a run, where there are several
   * @param {() => void} onZoom called before the viewer changes what is visible
   */
  constructor(figure, titleOf, onZoom) {
    const to = (ms) => this.timeline.begins_at_s + ms / 1000;
    const from = (atS) => (this.timeline === null ? null : (atS - this.timeline.begins_at_s) * 1000);
    super(figure, {
      height: EMPTY_HEIGHT,
      link: { ...overTime, to, from, select: (since, until) => this.#see(from(since), from(until)) },
      attributes: { tabindex: "0", role: "application", "aria-roledescription": "timeline" },
    });
    this.titleOf = titleOf;
    this.onZoom = onZoom;
    this.plot.addEventListener("wheel", (event) => this.#onWheel(event), { passive: false });
  }

  /** Shows a timeline, all of it. */
  show(timeline) {
    this.timeline = timeline;
    this.hovered = null;
    this.picked = null;
    this.fit();
  }

  /** Groups bars by micro-batch instead of by phase, if there are any. */
  groupByMicroBatch(isWanted) {
    this.byMicroBatch = isWanted;
    if (this.timeline !== null) this.#layOut();
  }

  #layOut() {
    const isEmpty = this.timeline.spans.length === 0;
    this.layout = layOut(this.timeline, this.byMicroBatch, this.titleOf);
    this.height = isEmpty ? EMPTY_HEIGHT : this.layout.height + AXIS;
    this.draw();
  }

  get workers() {
    return this.layout.workers;
  }

  /** Whether rows say whose they are. */
  get namesWorkers() {
    return this.workers.length > 1 || (this.byMicroBatch && microBatchesOf(this.timeline).length > 0);
  }

  data() {
    return this.timeline === null ? [[], []] : [[this.view.start, this.view.end], [0, 1]];
  }

  configuration() {
    return {
      padding: [0, 28, 0, 0],
      scales: { x: { time: false, range: (_, start, end) => [start ?? 0, end ?? 1] }, y: { range: () => [0, 1] } },
      axes: [
        { ...TIME_AXIS, label: "time since the start of the first step", space: 100, incrs: undefined, values: (_, splits) => splits.map((ms) => tick(ms)) },
        { size: GUTTER, grid: { show: false }, values: () => [] },
      ],
      series: [{ paths: () => null, points: { show: false } }],
    };
  }

  paint(context, area) {
    paintTimeline(context, this, area);
  }

  /** Shows all of the timeline. */
  fit() {
    this.view = { start: 0, end: Math.max(SHORTEST_MS, this.timeline.duration_ms) };
    this.#layOut();
  }

  /** Zooms by a factor around a share of the visible part. */
  zoom(factor, share = 0.5) {
    const { start, end } = this.view;
    const length = Math.min(this.timeline.duration_ms, Math.max(SHORTEST_MS, (end - start) / factor));
    const first = start + (end - start - length) * share;
    this.#see(first, first + length);
  }

  /** Makes what is between two times visible, in milliseconds since the start of the timeline. */
  #see(from, to) {
    this.onZoom();
    const length = Math.max(SHORTEST_MS, to - from);
    const start = Math.max(0, Math.min(from, this.timeline.duration_ms - length));
    this.view = { start, end: start + length };
    this.draw();
  }

  /** The wheel moves sideways, and with Ctrl it zooms; else it scrolls the page. */
  #onWheel(event) {
    const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const area = this.area();
    if (area === null || (!event.ctrlKey && !event.metaKey && !isSideways)) return;
    event.preventDefault();
    const { start, end } = this.view;
    const moved = (event.deltaX / area.width) * (end - start);
    if (isSideways) this.#see(start + moved, end + moved);
    else this.zoom(event.deltaY < 0 ? 1.2 : 1 / 1.2, Math.min(1, Math.max(0, this.uplot.cursor.left / area.width)));
  }

  /** Names the bar at the pointer. */
  pointed(cursor) {
    const bar = cursor !== null && cursor.event.buttons === 0 ? this.atPointer : null;
    if (bar === null) hideTip();
    else showTip(cursor.event, describe(bar));
    if (bar === this.hovered) return;
    this.hovered = bar;
    this.uplot.redraw(false);
  }

  /** The bar at the pointer, null if there is none. */
  get atPointer() {
    const { left: x, top: y } = this.uplot.cursor;
    const row = this.layout.rows.find((one) => y >= one.y && y < one.y + this.layout.rowHeight);
    if (!row || x < 0) return null;
    const ms = this.uplot.posToVal(x, "x");
    const slack = this.uplot.posToVal(x + 1.5, "x") - ms; // thin bars can be hit too
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

  /** Picks a bar, or none, and moves the view so that it shows the bar. */
  pick(bar) {
    this.picked = bar;
    const { start, end } = this.view;
    const length = end - start;
    if (bar !== null && (bar.start_ms < start || bar.start_ms + Math.min(bar.duration_ms, length) > end)) {
      const first = bar.start_ms + bar.duration_ms / 2 - length / 2;
      this.#see(first, first + length);
    } else {
      this.draw();
    }
  }
}

/** Describes a bar in words. */
export function describe(bar) {
  return `${bar.segment}\n${bar.lane}${bar.worker ? ` on ${bar.worker}` : ""}: ${milliseconds(bar.duration_ms)}, from ${milliseconds(bar.start_ms)}`;
}

/** Formats a tick: "0 ms", "12.5 ms", "1.25 s". */
function tick(ms) {
  return ms < 1000 ? `${Number(ms.toFixed(3))} ms` : `${Number((ms / 1000).toFixed(6))} s`;
}
