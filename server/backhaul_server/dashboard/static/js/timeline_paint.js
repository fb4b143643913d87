// Draws the bars of the timeline on a canvas.

import { colour, LANE_COLOURS } from "./colour.js";
import { HEAD, RUN_HEAD } from "./timeline_layout.js";

/** Width of the labels on the left of the bars, in pixels. */
export const GUTTER = 106;

const ROUND_PIXELS = 6;
const HIDDEN_PIXELS = 0.5;

/** Draws what of the chart is visible now, given the place of the bars. */
export function paintTimeline(context, chart, area) {
  context.textBaseline = "middle";
  context.textAlign = "left";
  drawLabels(context, chart);
  drawHeads(context, chart);
  context.beginPath();
  context.rect(area.left, 0, area.width, area.height);
  context.clip();
  context.translate(area.left, 0);
  drawSteps(context, chart, area);
  drawBars(context, chart, area);
}

function drawSteps(context, chart, { width, height }) {
  const x = (ms) => chart.uplot.valToPos(ms, "x");
  context.font = "11.5px Inter, system-ui, sans-serif";
  const isOfMany = chart.layout.heads.length > 0;
  const ofFirst = chart.timeline.steps.filter((step) => !isOfMany || step.run === chart.timeline.runs[0].run);
  ofFirst.forEach((step, i) => {
    const from = Math.max(0, x(step.start_ms));
    const to = Math.min(width, x(step.start_ms + step.duration_ms));
    if (to <= from) return;
    if (i % 2 === 0) {
      context.fillStyle = colour("raised");
      context.fillRect(from, 0, to - from, height);
    }
    context.fillStyle = colour("strong-line");
    context.fillRect(from, 0, 1, height);
    context.fillStyle = colour("faint");
    const label = `step ${step.number}`;
    if (context.measureText(label).width + 12 < to - from) context.fillText(label, from + 6, HEAD / 2);
  });
}

function drawHeads(context, chart) {
  context.font = "600 12px Inter, system-ui, sans-serif";
  context.fillStyle = colour("ink");
  for (const head of chart.layout.heads) {
    context.fillText(head.title, 0, head.y + RUN_HEAD / 2 + 1);
  }
}

function drawLabels(context, chart) {
  for (const row of chart.layout.rows) {
    const y = row.y + chart.layout.rowHeight / 2;
    context.font = `${Math.min(12, chart.layout.rowHeight)}px Inter, system-ui, sans-serif`;
    context.fillStyle = colour("ink");
    context.fillText(row.label, 0, y);
    if (chart.namesWorkers && row.worker >= 0) {
      context.fillStyle = colour("faint");
      context.textAlign = "right";
      context.fillText(`w${row.worker + 1}`, GUTTER - 8, y);
      context.textAlign = "left";
    }
  }
}

function drawBars(context, chart, area) {
  const { start, end } = chart.view;
  const perMs = area.width / (end - start);
  const call = (chart.hovered ?? chart.picked)?.call ?? null;
  context.font = "11px Inter, system-ui, sans-serif";
  for (const row of chart.layout.rows) {
    context.fillStyle = colour("grid");
    context.fillRect(0, row.y + chart.layout.rowHeight + 1, area.width, 1);
    let drawnTo = -1;
    for (const bar of row.bars) {
      const x = (bar.start_ms - start) * perMs;
      const width = Math.max(1, bar.duration_ms * perMs - (bar.duration_ms * perMs > 4 ? 1 : 0));
      const isMeant = bar.call === call;
      if (x + width < 0 || bar.start_ms > end) continue;
      if (x + width < drawnTo + HIDDEN_PIXELS && !isMeant) continue; // of thousands in a pixel one is enough
      drawnTo = x + width;
      context.globalAlpha = call === null || isMeant ? 1 : 0.28;
      context.fillStyle = colour(LANE_COLOURS[bar.lane]);
      if (width < ROUND_PIXELS) {
        context.fillRect(x, row.y, width, chart.layout.rowHeight);
      } else {
        context.beginPath();
        context.roundRect(x, row.y, width, chart.layout.rowHeight, 3);
        context.fill();
        drawName(context, bar, row, chart.layout.rowHeight, Math.max(x, 0), x + width);
      }
      if (bar === chart.picked) {
        context.strokeStyle = colour("ink");
        context.lineWidth = 2;
        context.strokeRect(x, row.y, width, chart.layout.rowHeight);
      }
    }
    context.globalAlpha = 1;
  }
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

function isBright(rgb) {
  const value = Number.parseInt(rgb.slice(1), 16);
  const [red, green, blue] = [value >> 16, (value >> 8) & 255, value & 255];
  return 0.299 * red + 0.587 * green + 0.114 * blue > 130;
}
