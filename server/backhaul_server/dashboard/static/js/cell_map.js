// What heat maps have in common: a canvas with columns of time and rows of cells, a legend of shades, a cell that the
// pointer or the arrow keys choose, marks of events, and a part of the time that is chosen by dragging.

import { colour, drawInTheme, translucent } from "./colour.js";
import { addCopyButton } from "./copy.js";
import { CursorLine, selectByDragging, timeCursor } from "./cursor.js";
import { element, explain, setAttribute, speak } from "./dom.js";
import { MarkLayer } from "./marks.js";
import { chooseRange } from "./range.js";
import { drawTimes } from "./ticks.js";
import { hideTip, showTip } from "./tip.js";

const MARKED_FROM = 2; // pixels from the top of the canvas, above the cells
const NARROW = 6; // pixels of a cell; narrower ones have no gap between them
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

/**
 * A heat map in a figure. A subclass has `area()`: the place of the cells, `{left, top, width, height}` in pixels;
 * `columns`: the number of columns; `rows`: [first, last] row; `rowsUp`: whether rows begin at the bottom; `isEmpty`;
 * `times`: [since, until] of all columns in seconds since 1970; `strength(column, row)`: a share from 0 to 1, or null for
 * no cell; `text()`: describes the chosen cell; `drawMore(context, area, size)`: draws the labels.
 */
export class CellMap {
  /**
   * @param {HTMLElement} figure receives the map
   * @param {{attributes?: object, plotClass?: string, weakest: number, legend: (scale: Node) => Node[]}} options attributes
   *   of the canvas, the alpha of the weakest shade, and a function that returns the items of the legend around the shades
   */
  constructor(figure, { attributes = {}, plotClass = "plot", weakest, legend }) {
    this.figure = figure;
    this.weakest = weakest;
    this.cursor = null; // [column, row] of the chosen cell
    this.canvas = element("canvas", { tabindex: "0", role: "img", "aria-label": figure.querySelector("figcaption").textContent, ...attributes });
    this.canvas.style.width = "100%";
    this.note = element("p", { class: "empty", hidden: "" });
    this.plot = element("div", { class: plotClass }, this.canvas, this.note);
    this.scale = element("canvas", { "aria-hidden": "true", width: "96", height: "10" });
    figure.append(element("ul", { class: "legend" }, ...legend(this.scale)), this.plot);
    addCopyButton(figure);
    this.line = new CursorLine(this.plot);
    this.marks = new MarkLayer(this.plot, () => this.#marked());
    timeCursor.add(this);
    selectByDragging(this.plot, this.canvas, (from, to) => {
      this.wasDragged = true;
      if (this.#marked()) chooseRange(this.#timeAt(from), this.#timeAt(to));
    });
    new ResizeObserver(() => this.draw()).observe(this.plot);
    drawInTheme(() => this.draw());
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => this.#choose(null, null));
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  /** Describes the map to screen readers; if there is nothing to show, `sentence` says why. */
  describe(description, sentence) {
    explain(this.note, sentence);
    this.plot.toggleAttribute("data-empty", sentence !== "");
    setAttribute(this.canvas, "aria-label", sentence || description);
  }

  /** Returns where events are marked, with the times at the edges; null while there are no columns. */
  #marked() {
    if (this.isEmpty || this.canvas.clientWidth === 0) return null;
    const { left, top, width, height } = this.area();
    const [since, until] = this.times;
    return { left, top: MARKED_FROM, width, height: height + top - MARKED_FROM, since, until };
  }

  #timeAt(x) {
    const { left, width, since, until } = this.#marked();
    return since + ((x - left) / width) * (until - since);
  }

  /** Shows the cursor where another chart is pointed at. */
  showCursor(atS) {
    const marked = this.#marked();
    const isInside = marked !== null && atS !== null && atS >= marked.since && atS <= marked.until;
    this.line.place(isInside ? atS : null, marked);
  }

  draw() {
    const { canvas } = this;
    const width = canvas.clientWidth;
    if (width === 0 || this.columns === undefined) return;
    const ratio = devicePixelRatio;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(canvas.clientHeight * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    this.#drawScale();
    this.marks.place();
    if (this.isEmpty) return;
    const area = this.area();
    const size = this.#cellSize();
    this.drawUnder?.(context, area, size);
    this.#drawCells(context, size);
    this.drawMore(context, area, size);
    context.font = "11.5px Inter, system-ui, sans-serif";
    context.fillStyle = colour("faint");
    drawTimes(context, { ...this.#marked(), bottom: area.top + area.height }, width);
    if (this.cursor === null) return;
    const [x, y] = this.#cornerOf(...this.cursor);
    context.strokeStyle = colour("ink");
    context.lineWidth = 1.5;
    context.strokeRect(x, y, Math.max(3, size[0]), size[1]);
  }

  #cellSize() {
    const { width, height } = this.area();
    const [first, last] = this.rows;
    return [width / Math.max(1, this.columns), height / (last - first + 1)];
  }

  #cornerOf(column, row) {
    const { left, top } = this.area();
    const [width, height] = this.#cellSize();
    const [first, last] = this.rows;
    return [left + column * width, top + (this.rowsUp ? last - row : row - first) * height];
  }

  #drawCells(context, [width, height]) {
    const shades = Array.from({ length: 101 }, (_, i) => this.#shade(i / 100));
    const [first, last] = this.rows;
    for (let column = 0; column < this.columns; column += 1) {
      for (let row = first; row <= last; row += 1) {
        const strength = this.strength(column, row);
        if (strength === null) continue;
        const [x, y] = this.#cornerOf(column, row);
        context.fillStyle = shades[Math.round(100 * clamp(strength, 0, 1))];
        context.fillRect(x, y, Math.max(1, Math.ceil(width) - (width > NARROW ? 1 : 0)), Math.ceil(height) - (height > NARROW ? 1 : 0));
      }
    }
  }

  /** Returns a shade of the page's blue. One hue is enough: the lightness shows the strength. */
  #shade(strength) {
    return translucent("blue", (this.weakest + (1 - this.weakest) * strength).toFixed(3));
  }

  #drawScale() {
    const context = this.scale.getContext("2d");
    context.clearRect(0, 0, this.scale.width, this.scale.height); // shades are transparent, and would add up
    for (let x = 0; x < this.scale.width; x += 1) {
      context.fillStyle = this.#shade(x / this.scale.width);
      context.fillRect(x, 0, 1, this.scale.height);
    }
  }

  /** Chooses a cell, or none, and a time for the cursors of all charts. */
  #choose(cell, atS) {
    this.cursor = cell;
    timeCursor.point(atS, this);
    if (cell === null) hideTip();
    this.draw();
  }

  #point(event) {
    if (this.isEmpty) return;
    const { left, top } = this.area();
    const [width, height] = this.#cellSize();
    const [first, last] = this.rows;
    const column = Math.floor((event.offsetX - left) / width);
    const below = Math.floor((event.offsetY - top) / height);
    const row = this.rowsUp ? last - below : first + below;
    const isInside = column >= 0 && column < this.columns && row >= first && row <= last;
    this.#choose(isInside ? [column, row] : null, isInside ? this.#timeAt(event.offsetX) : null);
    if (isInside) showTip(event, this.text());
  }

  /** Moves the chosen cell with the arrow keys, and reads it out. */
  onKey(event) {
    const down = this.rowsUp ? -1 : 1;
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -down], ArrowDown: [0, down] }[event.key];
    if (!move || this.isEmpty) return;
    event.preventDefault();
    const [first, last] = this.rows;
    const [column, row] = this.cursor ?? [this.columns, first];
    this.cursor = [clamp(column + move[0], 0, this.columns - 1), clamp(row + move[1], first, last)];
    speak(this.text());
    this.draw();
  }
}

/** Returns the first column of a map that begins with the first column that has something, or a few columns before it. */
export function firstShown(columns, hasSomething, fewest) {
  const first = Array.from({ length: columns }, (_, column) => column).findIndex(hasSomething);
  return Math.max(0, Math.min(first, columns - fewest));
}
