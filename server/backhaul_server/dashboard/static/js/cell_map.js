// What heat maps have in common: columns of time and rows of cells, a legend of shades, and a cell that the pointer or the
// arrow keys choose.

import { colour, translucent } from "./colour.js";
import { element, speak } from "./dom.js";
import { Plot, TIME_AXIS } from "./plot.js";
import { fixedRange } from "./range.js";
import { hideTip, showTip } from "./tip.js";

const FEWEST_COLUMNS = 15;
const NARROW = 6; // pixels of a cell; narrower ones have no gap between them
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

/**
 * A heat map in a figure. A subclass has `strength(column, row)`: a share from 0 to 1, or null for no cell; `text(column,
 * row)`: describes a cell; `down`: 1 if rows begin at the top, -1 at the bottom; and `labels`: uPlot's axis of the rows.
 */
export class CellMap extends Plot {
  roomAbove = 16;
  times = { at_s: [], interval_s: 1 };
  columns = [0, -1]; // the first and the last
  rows = [0, -1];
  cell = null; // [column, row] of the chosen cell

  /**
   * @param {HTMLElement} figure receives the map
   * @param {{weakest: number, legend: (shades: Node) => Node[]}} options the alpha of the weakest shade; a function that returns
   *   the items of the legend around the shades; and those of a plot
   */
  constructor(figure, { weakest, legend, attributes, ...options }) {
    super(figure, { ...options, attributes: { tabindex: "0", ...attributes } });
    this.weakest = weakest;
    const shades = element("span", { class: "shades", "aria-hidden": "true" });
    shades.style.setProperty("--weakest", weakest);
    this.legend.append(...legend(shades));
    this.plot.addEventListener("keydown", (event) => this.onKey(event));
  }

  /**
   * Shows cells. Of a live range, columns before the first one that has a cell are left out, except for a few.
   * @param {{at_s: number[], interval_s: number}} times when each column begins, and the seconds of a column
   * @param {{rows: [number, number], last: number}} shown the first and the last row, and the last column
   */
  update(times, { rows, last }, description, sentence) {
    this.times = times;
    this.rows = rows;
    this.columns = [0, last];
    const filled = fixedRange() ? 0 : (this.#cells()[0]?.[0] ?? 0);
    this.columns = [Math.max(0, Math.min(filled, last + 1 - FEWEST_COLUMNS)), last];
    this.describe(description, sentence);
    this.draw();
  }

  data() {
    const { at_s: at, interval_s: width } = this.times;
    const [first, last] = this.columns;
    return last < first ? [[], []] : [[at[first], at[last] + width], this.#edges()];
  }

  #edges() {
    return [this.rows[0], Math.max(this.rows[0], this.rows[1]) + 1];
  }

  configuration() {
    return {
      padding: [18, 28, 0, 0],
      scales: {
        x: { time: false, range: (_, since, until) => [since ?? 0, until ?? 1] },
        y: { range: () => this.#edges(), dir: -this.down },
      },
      axes: [{ ...TIME_AXIS, ...this.timeAxis }, { grid: { show: false }, ...this.labels }],
      series: [{ paths: () => null, points: { show: false } }],
    };
  }

  /** Returns [column, row] of each cell. */
  #cells() {
    const numbers = ([first, last]) => Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => first + i);
    const all = numbers(this.columns).flatMap((column) => numbers(this.rows).map((row) => [column, row]));
    return all.filter((cell) => this.strength(...cell) !== null);
  }

  /** Returns the width and the height of a cell in pixels. */
  sizeIn({ width, height }) {
    return [width / (this.columns[1] - this.columns[0] + 1), height / (this.rows[1] - this.rows[0] + 1)];
  }

  paint(context, area) {
    const [width, height] = this.sizeIn(area);
    const corner = ([column, row]) => [area.left + (column - this.columns[0]) * width, area.top + (this.down > 0 ? row - this.rows[0] : this.rows[1] - row) * height];
    // One hue is enough: the lightness shows the strength.
    const shades = Array.from({ length: 101 }, (_, i) => translucent("blue", (this.weakest + (1 - this.weakest) * (i / 100)).toFixed(3)));
    for (const cell of this.#cells()) {
      context.fillStyle = shades[Math.round(100 * clamp(this.strength(...cell), 0, 1))];
      context.fillRect(...corner(cell), Math.max(1, Math.ceil(width) - (width > NARROW ? 1 : 0)), Math.ceil(height) - (height > NARROW ? 1 : 0));
    }
    if (this.cell === null) return;
    context.strokeStyle = colour("ink");
    context.lineWidth = 1.5;
    context.strokeRect(...corner(this.cell), Math.max(3, width), height);
  }

  /** Chooses the cell at the pointer, and says what it is. */
  pointed(cursor) {
    this.cell = null;
    if (cursor === null) hideTip();
    else {
      const [width, height] = this.sizeIn(this.area());
      const [across, below] = [Math.floor(cursor.left / width), Math.floor(cursor.top / height)];
      const row = this.down > 0 ? this.rows[0] + below : this.rows[1] - below;
      this.cell = [clamp(this.columns[0] + across, ...this.columns), clamp(row, ...this.rows)];
      showTip(cursor.event, this.text(...this.cell));
    }
    this.uplot.redraw(false);
  }

  /** Moves the chosen cell with the arrow keys, and reads it out. */
  onKey(event) {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -this.down], ArrowDown: [0, this.down] }[event.key];
    if (!move || this.area() === null) return;
    event.preventDefault();
    const [column, row] = this.cell ?? [this.columns[1] + 1, this.rows[0]];
    this.cell = [clamp(column + move[0], ...this.columns), clamp(row + move[1], ...this.rows)];
    speak(this.text(...this.cell));
    this.uplot.redraw(false);
  }
}
