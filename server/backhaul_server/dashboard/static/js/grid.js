// A heat map with a row per worker and a column per interval of time: one look at all workers.

import { CellMap } from "./cell_map.js";
import { colour } from "./colour.js";
import { element } from "./dom.js";
import { clock, date, percent } from "./format.js";
import { STATES } from "./table.js";

const EDGE = { right: 12, top: 18, bottom: 26 }; // on top there is room for the marks of events
const FEWEST_ROWS = 4; // have room for a sentence where there is nothing to show
const ROWS = { highest: 24, lowest: 9, wanted: 620 };
const GLYPHS = { good: "●", warn: "▲", bad: "✕" };

export class GridMap extends CellMap {
  isEmpty = true;

  /**
   * @param {HTMLElement} figure receives the map
   * @param {string} field of a worker, with a share from 0 to 1 or null for each time
   * @param {(address: string) => void} onPick called with the worker whose row was clicked
   */
  constructor(figure, field, onPick) {
    super(figure, {
      attributes: { role: "application", "aria-roledescription": "heat map" },
      plotClass: "plot grid-plot",
      weakest: 0.06,
      legend: (scale) => [element("li", {}, element("b", {}, "0 %"), scale, element("b", {}, "100 %")), element("li", {}, "no cell: no answer")],
    });
    this.field = field;
    this.onPick = onPick;
    this.title = figure.querySelector("figcaption").textContent;
    this.canvas.addEventListener("click", (event) => {
      const wasDragged = this.wasDragged;
      this.wasDragged = false;
      const worker = this.fleet?.workers[Math.floor((event.offsetY - EDGE.top) / this.rowHeight)];
      if (worker && !wasDragged) this.onPick(worker.address);
    });
  }

  update(fleet, sentence) {
    const { workers } = fleet;
    this.fleet = fleet;
    this.columns = fleet.at_s.length;
    this.isEmpty = workers.length === 0 || this.columns < 2;
    this.rows = [0, workers.length - 1];
    this.rowHeight = Math.max(ROWS.lowest, Math.min(ROWS.highest, Math.floor(ROWS.wanted / Math.max(1, workers.length))));
    this.canvas.style.height = `${EDGE.top + Math.max(sentence ? FEWEST_ROWS : 1, workers.length) * this.rowHeight + EDGE.bottom}px`;
    const answering = workers.filter((worker) => worker.state !== "unreachable");
    const now = answering.map((worker) => worker[this.field].at(-1)).filter((share) => share !== null && share !== undefined);
    const mean = now.length ? now.reduce((sum, share) => sum + share, 0) / now.length : null;
    const most = now.length ? Math.max(...now) : null;
    const missing = workers.length - answering.length;
    const without = missing > 0 ? `, without the ${missing} that ${missing === 1 ? "is" : "are"} unreachable` : "";
    this.describe(`${this.title} of ${workers.length} workers: now ${percent(mean)} in the mean, ${percent(most)} at most${without}. Arrow keys read cells, Enter shows the worker.`, sentence);
    this.draw();
  }

  get times() {
    const { at_s: at } = this.fleet;
    return [at[0], at.at(-1) + (at[1] - at[0])];
  }

  area() {
    const left = this.canvas.clientWidth < 480 ? 92 : 138;
    return { left, top: EDGE.top, width: this.canvas.clientWidth - left - EDGE.right, height: this.fleet.workers.length * this.rowHeight };
  }

  strength(column, row) {
    return this.fleet.workers[row][this.field][column];
  }

  drawUnder(context, { left, top, width }) {
    context.fillStyle = colour("raised");
    this.fleet.workers.forEach((_, row) => context.fillRect(left, top + row * this.rowHeight, width, this.rowHeight - 1));
  }

  drawMore(context, area, [cellWidth]) {
    context.textBaseline = "middle";
    this.fleet.workers.forEach((worker, row) => {
      const y = area.top + (row + 0.5) * this.rowHeight;
      this.#drawAge(context, worker, area, y, cellWidth);
      const isPointed = this.cursor?.[1] === row;
      context.font = `${isPointed ? "600 " : ""}${Math.min(12, this.rowHeight - 1)}px Inter, system-ui, sans-serif`;
      const [, level] = STATES[worker.state];
      context.fillStyle = colour(level);
      context.textAlign = "left";
      context.fillText(GLYPHS[level], 0, y);
      context.fillStyle = colour(level === "good" ? "ink" : level);
      context.fillText(fitting(context, worker.address, area.left - 22), 14, y);
    });
  }

  /** Writes when an unreachable worker last answered where its row has no cells up to now, if there is room. */
  #drawAge(context, worker, { left, width }, y, cellWidth) {
    const text = worker.seen_at_s <= this.times[1] ? lastAnswer(worker) : "";
    const blank = worker[this.field].length - 1 - worker[this.field].findLastIndex((share) => share !== null);
    context.font = `${Math.min(11.5, this.rowHeight - 1)}px Inter, system-ui, sans-serif`;
    context.fillStyle = colour("faint");
    context.textAlign = "right";
    if (text && context.measureText(text).width <= blank * cellWidth - 12) context.fillText(text, left + width - 6, y);
  }

  text() {
    const [column, row] = this.cursor;
    const worker = this.fleet.workers[row];
    const share = worker[this.field][column];
    const state = [worker.state, lastAnswer(worker)].filter(Boolean).join(", ");
    return `${worker.address} (${state})\n${clock(this.fleet.at_s[column])}: ${share === null ? "no answer" : percent(share)}`;
  }

  onKey(event) {
    if (event.key === "Enter" && !this.isEmpty) this.onPick(this.fleet.workers[this.cursor?.[1] ?? 0].address);
    else super.onKey(event);
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
