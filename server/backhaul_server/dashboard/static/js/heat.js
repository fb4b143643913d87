// A heat map of call durations over time, with a logarithmic scale of durations.

import { CellMap } from "./cell_map.js";
import { colour } from "./colour.js";
import { element, setText } from "./dom.js";
import { clock, count, milliseconds } from "./format.js";

const FEWEST_ROWS = 8;
const TICKS_MS = [0.1, 1, 10, 100, 1000, 10000, 100000];

export class HeatMap extends CellMap {
  down = -1;
  max = 0;

  constructor(figure) {
    const most = element("b");
    super(figure, { height: 300, weakest: 0.1, legend: (shades) => [element("li", {}, "calls: ", element("b", {}, "1"), shades, most)] });
    this.most = most;
  }

  update(heat, method) {
    this.heat = heat;
    const all = heat.counts.flat();
    this.max = Math.max(0, ...all);
    const rows = heat.counts.flatMap((column) => column.flatMap((calls, row) => (calls > 0 ? [row] : [])));
    const first = Math.min(...rows);
    const last = Math.max(...rows);
    // Rows around the occupied ones, so that a single bucket does not fill the map.
    const low = Math.max(0, first - 1);
    const shown = [low, Math.min(heat.bounds_ms.length, Math.max(last + 1, low + FEWEST_ROWS))];
    this.caption = method ? `Duration of ${method} calls` : "Duration of calls, all RPCs";
    setText(this.most, count(this.max));
    const total = all.reduce((sum, calls) => sum + calls, 0);
    if (this.max === 0) super.update(heat, { rows: [0, -1], last: -1 }, "", "No calls in this time range. Once a trainer runs segments, this map shows how long its calls take.");
    else super.update(heat, { rows: shown, last: heat.counts.length - 1 }, `Heat map: ${count(total)} calls between ${milliseconds(this.#lower(first))} and ${milliseconds(this.#upper(last))}. Arrow keys read cells.`, "");
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

  get labels() {
    const shown = (low, high) => TICKS_MS.filter((tick) => this.#rowAt(tick) >= low && this.#rowAt(tick) <= high);
    return {
      size: 58,
      gap: 4,
      ticks: { size: 4, width: 1, stroke: colour("grid") },
      splits: (_, axis, low, high) => (this.max === 0 ? [] : shown(low, high).map((tick) => this.#rowAt(tick))),
      values: (u) => (this.max === 0 ? [] : shown(u.scales.y.min, u.scales.y.max).map((tick) => (tick < 1000 ? `${tick} ms` : `${tick / 1000} s`))),
    };
  }

  text(column, row) {
    const upper = this.#upper(row);
    const range = upper === Infinity ? `over ${milliseconds(this.#lower(row))}` : `${milliseconds(this.#lower(row))} to ${milliseconds(upper)}`;
    const calls = this.heat.counts[column][row];
    return `${clock(this.heat.at_s[column])}\n${range}: ${count(calls)} ${calls === 1 ? "call" : "calls"}`;
  }
}
