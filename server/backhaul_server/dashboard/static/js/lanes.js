// Draws the timeline: lanes of bars on a canvas. It also finds the bar at a position and manages the visible time.

import { colour, LANE_COLOURS } from "./colour.js";
import { milliseconds } from "./format.js";

const LANES = [
  ["forward", "forward"],
  ["wait", "wait"],
  ["trainer", "recompute here"],
  ["upload", "upload"],
  ["queue", "queue"],
  ["recompute", "recompute"],
  ["backward", "backward"],
  ["download", "download"],
];
const COMPUTING = new Set(["forward", "trainer", "recompute", "backward"]);
const LOWEST_ROW = 19;
const HIGHEST_ROW = 28;
const WANTED_HEIGHT = 440;
const ROW_GAP = 2;
const LANE_GAP = 7;
const HEAD = 22;
const FOOT = 40;
const GUTTER = 106;
const RIGHT = 10;
const SHORTEST_MS = 0.5;
const ROUND_PIXELS = 6;
const HIDDEN_PIXELS = 0.5;

export class Lanes {
  constructor(canvas) {
    this.canvas = canvas;
    this.timeline = null;
    this.byMicroBatch = false;
    this.rows = [];
    this.view = { start: 0, end: 1 };
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
    this.draw();
  }

  fit() {
    this.view = { start: 0, end: Math.max(SHORTEST_MS, this.timeline?.duration_ms ?? 1) };
  }

  /** Groups bars by micro-batch instead of by phase, if there are any. */
  groupByMicroBatch(isWanted) {
    this.byMicroBatch = isWanted;
    if (this.timeline === null) return;
    this.#layOut();
    this.draw();
  }

  /** Whether rows say whose they are. */
  get namesWorkers() {
    return this.workers.length > 1 || this.#microBatches().length > 0;
  }

  #microBatches() {
    return this.byMicroBatch ? [...new Set(this.timeline.calls.map((call) => call.micro_batch))].filter(Boolean).sort((a, b) => a - b) : [];
  }

  /** Returns the lanes: label, function that selects bars, function that names a bar's row, and whether to show it empty. */
  #lanes() {
    const batches = this.#microBatches();
    if (batches.length === 0) {
      const row = (span) => `${span.worker}\n${String(span.row).padStart(4, "0")}`;
      // Recomputation on the trainer is rare and shown only where it took place.
      return LANES.map(([lane, label]) => ({ label, has: (span) => span.lane === lane, row, isKept: lane !== "trainer" }));
    }
    const { calls } = this.timeline;
    return batches.map((batch) => ({
      label: `micro-batch ${batch}`,
      has: (span) => calls[span.call].micro_batch === batch && COMPUTING.has(span.lane),
      row: (span) => span.worker,
      isKept: false,
    }));
  }

  /** Returns one row per lane, worker and row of bars, and one empty row for each phase without bars. */
  #layOut() {
    const { spans } = this.timeline;
    this.workers = [...new Set(spans.map((span) => span.worker).filter(Boolean))].sort();
    this.rows = [];
    for (const { label, has, row, isKept } of this.#lanes()) {
      const groups = new Map();
      for (const span of spans.filter(has)) {
        const key = row(span);
        if (!groups.has(key)) groups.set(key, []);
        groups.get(key).push(span);
      }
      if (groups.size === 0 && isKept) groups.set("", []);
      let isFirst = true;
      for (const [key, bars] of [...groups].sort(([a], [b]) => (a < b ? -1 : 1))) {
        bars.sort((a, b) => a.start_ms - b.start_ms);
        const worker = this.workers.indexOf(key.split("\n")[0]);
        this.rows.push({ label: isFirst ? label : "", worker, y: 0, bars });
        isFirst = false;
      }
    }
    this.#stack();
  }

  /** Returns the height of a row, which depends on the number of rows. */
  #stack() {
    const lanes = this.rows.filter((row) => row.label).length;
    const room = WANTED_HEIGHT - HEAD - FOOT - lanes * (LANE_GAP - ROW_GAP);
    this.rowHeight = Math.round(Math.min(HIGHEST_ROW, Math.max(LOWEST_ROW, room / this.rows.length - ROW_GAP)));
    let y = HEAD;
    this.rows.forEach((row, i) => {
      if (i > 0 && row.label) y += LANE_GAP - ROW_GAP;
      row.y = y;
      y += this.rowHeight + ROW_GAP;
    });
    this.height = y + LANE_GAP - ROW_GAP + FOOT;
    this.canvas.style.height = `${this.height}px`;
  }

  #scale() {
    const width = this.canvas.clientWidth - GUTTER - RIGHT;
    return { width, perMs: width / (this.view.end - this.view.start) };
  }

  #x(ms) {
    return GUTTER + (ms - this.view.start) * this.#scale().perMs;
  }

  /** Zooms by a factor around a position, in pixels from the left, or around the middle. */
  zoom(factor, x = null) {
    const { start, end } = this.view;
    const share = x === null ? 0.5 : Math.min(1, Math.max(0, (x - GUTTER) / this.#scale().width));
    const length = Math.min(this.timeline.duration_ms, Math.max(SHORTEST_MS, (end - start) / factor));
    this.#moveTo(start + (end - start - length) * share, length);
  }

  /** Moves the view by this number of pixels. */
  pan(pixels) {
    this.#moveTo(this.view.start + pixels / this.#scale().perMs, this.view.end - this.view.start);
  }

  #moveTo(start, length) {
    const first = Math.max(0, Math.min(start, this.timeline.duration_ms - length));
    this.view = { start: first, end: first + length };
    this.draw();
  }

  /** Returns the bar at a position of the canvas, null if there is none. */
  at(x, y) {
    const row = this.rows.find((one) => y >= one.y && y < one.y + this.rowHeight);
    if (!row || x < GUTTER) return null;
    const ms = this.view.start + (x - GUTTER) / this.#scale().perMs;
    const slack = 1.5 / this.#scale().perMs; // thin bars can be hit too
    const near = row.bars.filter((bar) => ms >= bar.start_ms - slack && ms <= bar.start_ms + bar.duration_ms + slack);
    return near.find((bar) => ms >= bar.start_ms && ms <= bar.start_ms + bar.duration_ms) ?? near[0] ?? null;
  }

  /** Returns the bar that an arrow key selects, starting from the picked bar; the first bar if none is picked. */
  neighbour(key) {
    const filled = this.rows.filter((row) => row.bars.length > 0);
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
    const width = canvas.clientWidth;
    if (width === 0 || this.timeline === null) return;
    const ratio = devicePixelRatio;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(this.height * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.textBaseline = "middle";
    this.#drawSteps(context);
    this.#drawLabels(context);
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, width - GUTTER - RIGHT, this.height);
    context.clip();
    this.#drawBars(context);
    context.restore();
    this.#drawAxis(context);
  }

  #drawSteps(context) {
    const bottom = this.height - FOOT + 4;
    const right = this.canvas.clientWidth - RIGHT;
    context.font = "11.5px Inter, system-ui, sans-serif";
    this.timeline.steps.forEach((step, i) => {
      const from = Math.max(GUTTER, this.#x(step.start_ms));
      const to = Math.min(right, this.#x(step.start_ms + step.duration_ms));
      if (to <= from) return;
      if (i % 2 === 0) {
        context.fillStyle = colour("raised");
        context.fillRect(from, 0, to - from, bottom);
      }
      context.strokeStyle = colour("strong-line");
      context.beginPath();
      context.moveTo(from + 0.5, 0);
      context.lineTo(from + 0.5, bottom);
      context.stroke();
      context.textAlign = "left";
      context.fillStyle = colour("faint");
      const label = `step ${step.number}`;
      if (context.measureText(label).width + 12 < to - from) context.fillText(label, from + 6, HEAD / 2);
    });
  }

  #drawLabels(context) {
    context.textAlign = "left";
    for (const row of this.rows) {
      const y = row.y + this.rowHeight / 2;
      context.font = "12px Inter, system-ui, sans-serif";
      context.fillStyle = colour("ink");
      context.fillText(row.label, 0, y);
      if (this.namesWorkers && row.worker >= 0) {
        context.fillStyle = colour("faint");
        context.textAlign = "right";
        context.fillText(`w${row.worker + 1}`, GUTTER - 8, y);
        context.textAlign = "left";
      }
      context.fillStyle = colour("grid");
      context.fillRect(GUTTER, row.y + this.rowHeight + 1, this.canvas.clientWidth - GUTTER - RIGHT, 1);
    }
  }

  #drawBars(context) {
    const { perMs } = this.#scale();
    const start = this.view.start;
    const call = (this.pointed ?? this.picked)?.call ?? null;
    context.font = "11px Inter, system-ui, sans-serif";
    for (const row of this.rows) {
      let drawnTo = -1;
      for (const bar of row.bars) {
        const x = GUTTER + (bar.start_ms - start) * perMs;
        const width = Math.max(1, bar.duration_ms * perMs - (bar.duration_ms * perMs > 4 ? 1 : 0));
        const isMeant = bar.call === call;
        if (x + width < GUTTER || bar.start_ms > this.view.end) continue;
        if (x + width < drawnTo + HIDDEN_PIXELS && !isMeant) continue; // of thousands in a pixel one is enough
        drawnTo = x + width;
        context.globalAlpha = call === null || isMeant ? 1 : 0.28;
        context.fillStyle = colour(LANE_COLOURS[bar.lane]);
        if (width < ROUND_PIXELS) {
          context.fillRect(x, row.y, width, this.rowHeight);
        } else {
          context.beginPath();
          context.roundRect(x, row.y, width, this.rowHeight, 3);
          context.fill();
          this.#drawName(context, bar, row, Math.max(x, GUTTER), x + width);
        }
        if (bar === this.picked) {
          context.strokeStyle = colour("ink");
          context.lineWidth = 2;
          context.strokeRect(x, row.y, width, this.rowHeight);
        }
      }
    }
    context.globalAlpha = 1;
  }

  #drawName(context, bar, row, from, to) {
    if (to - from < 26) return;
    const short = bar.segment.replace(/^.*(#\d+)$/, "$1");
    const text = context.measureText(bar.segment).width + 10 < to - from ? bar.segment : short;
    if (context.measureText(text).width + 8 > to - from) return;
    const fill = context.fillStyle;
    context.fillStyle = isBright(fill) ? "#14181c" : "#ffffff";
    context.fillText(text, from + 5, row.y + this.rowHeight / 2 + 0.5);
    context.fillStyle = fill;
  }

  #drawAxis(context) {
    const y = this.height - FOOT + 14;
    const { width, perMs } = this.#scale();
    const wanted = (this.view.end - this.view.start) / Math.max(2, Math.floor(width / 100));
    const unit = 10 ** Math.floor(Math.log10(wanted));
    const tick = [1, 2, 5, 10].map((factor) => factor * unit).find((value) => value >= wanted);
    context.font = "11.5px Inter, system-ui, sans-serif";
    context.fillStyle = colour("faint");
    for (let ms = Math.ceil(this.view.start / tick) * tick; ms <= this.view.end + 1e-9; ms += tick) {
      const x = GUTTER + (ms - this.view.start) * perMs;
      const label = ms === 0 ? "0 ms" : ms < 1000 ? `${Number(ms.toFixed(3))} ms` : `${Number((ms / 1000).toFixed(6))} s`;
      const half = context.measureText(label).width / 2;
      context.textAlign = "left";
      context.fillText(label, Math.min(Math.max(GUTTER, x - half), GUTTER + width - 2 * half), y);
    }
    context.textAlign = "center";
    context.fillText("time since the start of the first step", GUTTER + width / 2, y + 18);
  }
}

function isBright(rgb) {
  const value = Number.parseInt(rgb.slice(1), 16);
  const [red, green, blue] = [value >> 16, (value >> 8) & 255, value & 255];
  return 0.299 * red + 0.587 * green + 0.114 * blue > 130;
}

/** Describes a bar in words. */
export function describe(bar) {
  return `${bar.segment}\n${bar.lane}${bar.worker ? ` on ${bar.worker}` : ""}: ${milliseconds(bar.duration_ms)}, from ${milliseconds(bar.start_ms)}`;
}
