// A heat map with a row per worker and a column per interval of time: one look at all workers.

import { CellMap } from "./cell_map.js";
import { colour } from "./colour.js";
import { element } from "./dom.js";
import { clock, date, percent } from "./format.js";
import { STATES } from "./table.js";

const AROUND = 44; // pixels above and below the rows, for the marks of events and the axis
const FEWEST_ROWS = 4; // have room for a sentence where there is nothing to show
const ROWS = { highest: 24, lowest: 9, wanted: 620 };
const GLYPHS = { good: "●", warn: "▲", bad: "✕" };

export class GridMap extends CellMap {
  down = 1;
  timeAxis = { label: null, size: 26 };
  labels = { size: (u) => (u.width < 480 ? 92 : 138), values: () => [] };

  /**
   * @param {HTMLElement} figure receives the map
   * @param {string} field of a worker, with a share from 0 to 1 or null for each time
   * @param {(address: string) => void} onPick called with the worker whose row was clicked
   */
  constructor(figure, field, onPick) {
    super(figure, {
      attributes: { role: "application", "aria-roledescription": "heat map" },
      weakest: 0.06,
      legend: (shades) => [element("li", {}, element("b", {}, "0 %"), shades, element("b", {}, "100 %")), element("li", {}, "no cell: no answer")],
    });
    this.field = field;
    this.onPick = onPick;
    this.plot.addEventListener("click", (event) => {
      const area = this.area();
      const row = area && Math.floor((event.clientY - this.plot.getBoundingClientRect().top - area.top) / this.sizeIn(area)[1]);
      if (this.workers[row]) this.onPick(this.workers[row].address);
    });
  }

  update(fleet, sentence) {
    const { workers } = fleet;
    this.workers = workers;
    const rowHeight = Math.max(ROWS.lowest, Math.min(ROWS.highest, Math.floor(ROWS.wanted / Math.max(1, workers.length))));
    this.height = AROUND + Math.max(sentence ? FEWEST_ROWS : 1, workers.length) * rowHeight;
    const answering = workers.filter((worker) => worker.state !== "unreachable");
    const now = answering.map((worker) => worker[this.field].at(-1)).filter((share) => share !== null && share !== undefined);
    const mean = now.length ? now.reduce((sum, share) => sum + share, 0) / now.length : null;
    const most = now.length ? Math.max(...now) : null;
    const missing = workers.length - answering.length;
    const without = missing > 0 ? `, without the ${missing} that ${missing === 1 ? "is" : "are"} unreachable` : "";
    // The last interval is left out while it is so young that some worker which answers has no value in it yet.
    const isYoung = fleet.at_s.length > 1 && workers.some((worker) => worker.state === "serving" && worker[this.field].at(-1) === null);
    super.update(
      fleet,
      { rows: [0, workers.length - 1], last: fleet.at_s.length - (isYoung ? 2 : 1) },
      `${this.caption} of ${workers.length} workers: now ${percent(mean)} in the mean, ${percent(most)} at most${without}. Arrow keys read cells, Enter shows the worker.`,
      sentence,
    );
  }

  strength(column, row) {
    return this.workers[row][this.field][column];
  }

  paint(context, area) {
    const [cellWidth, rowHeight] = this.sizeIn(area);
    context.fillStyle = colour("raised");
    this.workers.forEach((_, row) => context.fillRect(area.left, area.top + row * rowHeight, area.width, rowHeight - 1));
    super.paint(context, area);
    context.textBaseline = "middle";
    this.workers.forEach((worker, row) => {
      const y = area.top + (row + 0.5) * rowHeight;
      this.#drawAge(context, worker, area, y, cellWidth, rowHeight);
      const isPointed = this.cell?.[1] === row;
      context.font = `${isPointed ? "600 " : ""}${Math.min(12, rowHeight - 1)}px Inter, system-ui, sans-serif`;
      const [, level] = STATES[worker.state];
      context.fillStyle = colour(level);
      context.textAlign = "left";
      context.fillText(GLYPHS[level], 0, y);
      context.fillStyle = colour(level === "good" ? "ink" : level);
      context.fillText(fitting(context, worker.address, area.left - 22), 14, y);
    });
  }

  /** Writes when an unreachable worker last answered where its row has no cells up to now, if there is room. */
  #drawAge(context, worker, { left, width, until }, y, cellWidth, rowHeight) {
    const text = worker.seen_at_s <= until ? lastAnswer(worker) : "";
    const blank = this.columns[1] - worker[this.field].findLastIndex((share) => share !== null);
    context.font = `${Math.min(11.5, rowHeight - 1)}px Inter, system-ui, sans-serif`;
    context.fillStyle = colour("faint");
    context.textAlign = "right";
    if (text && context.measureText(text).width <= blank * cellWidth - 12) context.fillText(text, left + width - 6, y);
  }

  text(column, row) {
    const worker = this.workers[row];
    const share = worker[this.field][column];
    const state = [worker.state, lastAnswer(worker)].filter(Boolean).join(", ");
    return `${worker.address} (${state})\n${clock(this.times.at_s[column])}: ${share === null ? "no answer" : percent(share)}`;
  }

  onKey(event) {
    if (event.key === "Enter" && this.area() !== null) this.onPick(this.workers[this.cell?.[1] ?? 0].address);
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
