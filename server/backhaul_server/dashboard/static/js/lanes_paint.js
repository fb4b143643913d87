// Draws the lanes of the timeline on a canvas.

import { colour, LANE_COLOURS } from "./colour.js";
import { FOOT, HEAD, RUN_HEAD } from "./lanes_layout.js";

/** Width of the labels on the left of the bars, in pixels. */
export const GUTTER = 106;

/** Width of the margin on the right of the bars, in pixels. */
export const RIGHT = 10;

const ROUND_PIXELS = 6;
const HIDDEN_PIXELS = 0.5;

/** Draws what of the lanes is visible now. */
export function paintLanes(context, lanes) {
  const width = lanes.canvas.clientWidth;
  context.textBaseline = "middle";
  drawSteps(context, lanes);
  drawLabels(context, lanes);
  drawHeads(context, lanes);
  context.save();
  context.beginPath();
  context.rect(GUTTER, 0, width - GUTTER - RIGHT, lanes.layout.height);
  context.clip();
  drawBars(context, lanes);
  context.restore();
  drawAxis(context, lanes);
}

function drawSteps(context, lanes) {
  const bottom = lanes.layout.height - FOOT + 4;
  const right = lanes.canvas.clientWidth - RIGHT;
  context.font = "11.5px Inter, system-ui, sans-serif";
  const isOfMany = lanes.layout.heads.length > 0;
  const ofFirst = lanes.timeline.steps.filter((step) => !isOfMany || step.run === lanes.timeline.runs[0].run);
  ofFirst.forEach((step, i) => {
    const from = Math.max(GUTTER, lanes.x(step.start_ms));
    const to = Math.min(right, lanes.x(step.start_ms + step.duration_ms));
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

function drawHeads(context, lanes) {
  context.font = "600 12px Inter, system-ui, sans-serif";
  context.fillStyle = colour("ink");
  context.textAlign = "left";
  for (const head of lanes.layout.heads) {
    context.fillText(head.title, 0, head.y + RUN_HEAD / 2 + 1);
  }
}

function drawLabels(context, lanes) {
  context.textAlign = "left";
  for (const row of lanes.layout.rows) {
    const y = row.y + lanes.layout.rowHeight / 2;
    context.font = `${Math.min(12, lanes.layout.rowHeight)}px Inter, system-ui, sans-serif`;
    context.fillStyle = colour("ink");
    context.fillText(row.label, 0, y);
    if (lanes.namesWorkers && row.worker >= 0) {
      context.fillStyle = colour("faint");
      context.textAlign = "right";
      context.fillText(`w${row.worker + 1}`, GUTTER - 8, y);
      context.textAlign = "left";
    }
    context.fillStyle = colour("grid");
    context.fillRect(GUTTER, row.y + lanes.layout.rowHeight + 1, lanes.canvas.clientWidth - GUTTER - RIGHT, 1);
  }
}

function drawBars(context, lanes) {
  const { perMs } = lanes.scale();
  const start = lanes.view.start;
  const call = (lanes.pointed ?? lanes.picked)?.call ?? null;
  context.font = "11px Inter, system-ui, sans-serif";
  for (const row of lanes.layout.rows) {
    let drawnTo = -1;
    for (const bar of row.bars) {
      const x = GUTTER + (bar.start_ms - start) * perMs;
      const width = Math.max(1, bar.duration_ms * perMs - (bar.duration_ms * perMs > 4 ? 1 : 0));
      const isMeant = bar.call === call;
      if (x + width < GUTTER || bar.start_ms > lanes.view.end) continue;
      if (x + width < drawnTo + HIDDEN_PIXELS && !isMeant) continue; // of thousands in a pixel one is enough
      drawnTo = x + width;
      context.globalAlpha = call === null || isMeant ? 1 : 0.28;
      context.fillStyle = colour(LANE_COLOURS[bar.lane]);
      if (width < ROUND_PIXELS) {
        context.fillRect(x, row.y, width, lanes.layout.rowHeight);
      } else {
        context.beginPath();
        context.roundRect(x, row.y, width, lanes.layout.rowHeight, 3);
        context.fill();
        drawName(context, bar, row, lanes.layout.rowHeight, Math.max(x, GUTTER), x + width);
      }
      if (bar === lanes.picked) {
        context.strokeStyle = colour("ink");
        context.lineWidth = 2;
        context.strokeRect(x, row.y, width, lanes.layout.rowHeight);
      }
    }
  }
  context.globalAlpha = 1;
}

function drawName(context, bar, row, rowHeight, from, to) {
  if (to - from < 26) return;
  const short = bar.segment.replace(/^.*(#\d+)$/, "$1");
  const text = context.measureText(bar.segment).width + 10 < to - from ? bar.segment : short;
  if (context.measureText(text).width + 8 > to - from) return;
  const fill = context.fillStyle;
  context.fillStyle = isBright(fill) ? "#14181c" : "#ffffff";
  context.fillText(text, from + 5, row.y + rowHeight / 2 + 0.5);
  context.fillStyle = fill;
}

function drawAxis(context, lanes) {
  const y = lanes.layout.height - FOOT + 14;
  const { width, perMs } = lanes.scale();
  const wanted = (lanes.view.end - lanes.view.start) / Math.max(2, Math.floor(width / 100));
  const unit = 10 ** Math.floor(Math.log10(wanted));
  const tick = [1, 2, 5, 10].map((factor) => factor * unit).find((value) => value >= wanted);
  context.font = "11.5px Inter, system-ui, sans-serif";
  context.fillStyle = colour("faint");
  for (let ms = Math.ceil(lanes.view.start / tick) * tick; ms <= lanes.view.end + 1e-9; ms += tick) {
    const x = GUTTER + (ms - lanes.view.start) * perMs;
    const label = ms === 0 ? "0 ms" : ms < 1000 ? `${Number(ms.toFixed(3))} ms` : `${Number((ms / 1000).toFixed(6))} s`;
    const half = context.measureText(label).width / 2;
    context.textAlign = "left";
    context.fillText(label, Math.min(Math.max(GUTTER, x - half), GUTTER + width - 2 * half), y);
  }
  context.textAlign = "center";
  context.fillText("time since the start of the first step", GUTTER + width / 2, y + 18);
}

function isBright(rgb) {
  const value = Number.parseInt(rgb.slice(1), 16);
  const [red, green, blue] = [value >> 16, (value >> 8) & 255, value & 255];
  return 0.299 * red + 0.587 * green + 0.114 * blue > 130;
}
