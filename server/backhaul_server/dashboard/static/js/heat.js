// A heat map of call durations over time, with a logarithmic scale of durations.

import { CellMap, firstShown } from "./cell_map.js";
import { colour } from "./colour.js";
import { byId, element, setText } from "./dom.js";
import { clock, count, milliseconds } from "./format.js";
import { fixedRange } from "./range.js";

const HEIGHT = 300;
const FEWEST_COLUMNS = 15;
const FEWEST_ROWS = 8;
const EDGE = { left: 58, right: 14, top: 18, bottom: 44 }; // on top there is room for the marks of events
const TICKS_MS = [0.1, 1, 10, 100, 1000, 10000, 100000];

class HeatMap extends CellMap {
  rowsUp = true;
  max = 0;

  constructor(figure) {
    const most = element("b");
    super(figure, { weakest: 0.1, legend: (scale) => [element("li", {}, "calls: ", element("b", {}, "1"), scale, most)] });
    this.most = most;
    this.canvas.style.height = `${HEIGHT}px`;
  }

  update(reported, method) {
    const begin = fixedRange() ? 0 : firstShown(reported.counts.length, (column) => reported.counts[column].some((calls) => calls > 0), FEWEST_COLUMNS);
    const heat = { ...reported, at_s: reported.at_s.slice(begin), counts: reported.counts.slice(begin) };
    this.heat = heat;
    const all = heat.counts.flat();
    this.max = Math.max(0, ...all);
    const rows = heat.counts.flatMap((column) => column.flatMap((calls, row) => (calls > 0 ? [row] : [])));
    const first = Math.min(...rows);
    const last = Math.max(...rows);
    // Rows around the occupied ones, so that a single bucket does not fill the map.
    const low = Math.max(0, first - 1);
    this.rows = [low, Math.min(heat.bounds_ms.length, Math.max(last + 1, low + FEWEST_ROWS))];
    setText(this.figure.querySelector("figcaption"), method ? `Duration of ${method} calls` : "Duration of calls, all RPCs");
    setText(this.most, count(this.max));
    const total = all.reduce((sum, calls) => sum + calls, 0);
    this.describe(
      this.isEmpty ? "" : `Heat map: ${count(total)} calls between ${milliseconds(this.#lower(first))} and ${milliseconds(this.#upper(last))}. Arrow keys read cells.`,
      this.isEmpty ? "No calls in this time range. Once a trainer runs segments, this map shows how long its calls take." : "",
    );
    this.draw();
  }

  get isEmpty() {
    return this.max === 0;
  }

  get columns() {
    return this.heat?.counts.length;
  }

  get times() {
    return [this.heat.at_s[0], this.heat.at_s.at(-1) + this.heat.interval_s];
  }

  area() {
    return { left: EDGE.left, top: EDGE.top, width: this.canvas.clientWidth - EDGE.left - EDGE.right, height: HEIGHT - EDGE.top - EDGE.bottom };
  }

  strength(column, row) {
    const calls = this.heat.counts[column][row];
    if (!calls) return null;
    return this.max === 1 ? 1 : Math.log(1 + calls) / Math.log(1 + this.max);
  }

  #lower(row) {
    return row === 0 ? 0 : this.heat.bounds_ms[row - 1];
  }

  #upper(row) {
    return this.heat.bounds_ms[row] ?? Infinity;
  }

  /** Returns the position of a duration on the scale, in rows. */
  #rowAt(ms) {
    const bounds = this.heat.bounds_ms;
    const row = bounds.findIndex((bound) => bound >= ms);
    if (row < 0) return bounds.length + 1;
    const lower = row > 0 ? bounds[row - 1] : bounds[0] / (bounds[1] / bounds[0]);
    return row + Math.log(ms / lower) / Math.log(bounds[row] / lower);
  }

  drawMore(context, area, [, cellHeight]) {
    const [first, last] = this.rows;
    context.font = "11.5px Inter, system-ui, sans-serif";
    context.fillStyle = colour("faint");
    context.strokeStyle = colour("grid");
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const tick of TICKS_MS) {
      const row = this.#rowAt(tick);
      if (row < first || row > last + 1) continue;
      const y = area.top + (last + 1 - row) * cellHeight;
      context.beginPath();
      context.moveTo(area.left - 4, y);
      context.lineTo(area.left, y);
      context.stroke();
      context.fillText(tick < 1000 ? `${tick} ms` : `${tick / 1000} s`, area.left - 8, y);
    }
    context.textAlign = "center";
    context.textBaseline = "top";
    context.fillText("time of day", area.left + area.width / 2, area.top + area.height + 26);
  }

  text() {
    const [column, row] = this.cursor;
    const upper = this.#upper(row);
    const range = upper === Infinity ? `over ${milliseconds(this.#lower(row))}` : `${milliseconds(this.#lower(row))} to ${milliseconds(upper)}`;
    const calls = this.heat.counts[column][row];
    return `${clock(this.heat.at_s[column])}\n${range}: ${count(calls)} ${calls === 1 ? "call" : "calls"}`;
  }
}

export const heatMap = () => new HeatMap(byId("heat"));
