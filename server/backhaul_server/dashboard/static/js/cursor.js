// Cursors that several charts share: what is pointed at in one chart is marked at the same place in the others.

import { element } from "./dom.js";

/** A position that charts share: a time, or a step of the compared runs. */
class Cursor {
  constructor() {
    this.charts = new Set();
    this.value = null;
  }

  /** Has `showCursor(value)` of a chart called when another chart is pointed at, with null when none is. */
  add(chart) {
    this.charts.add(chart);
  }

  /** Moves the cursor of all charts other than the one that is pointed at; null removes it. */
  point(value, source) {
    if (value === this.value) return;
    this.value = value;
    for (const chart of this.charts) {
      if (chart !== source) chart.showCursor(value);
    }
  }
}

/** Shared by all charts over time, in seconds since 1970. */
export const timeCursor = new Cursor();

/** Shared by the charts that compare runs, in steps. */
export const stepCursor = new Cursor();

/** A vertical line over a canvas that has no cursor of its own. */
export class CursorLine {
  constructor(plot) {
    this.line = element("div", { class: "cursor-line", hidden: "" });
    plot.append(this.line);
  }

  /**
   * Shows the line at a time; hides it for null.
   * @param {number | null} atS seconds since 1970
   * @param {object | null} area `{left, top, width, height, since, until}` of the chart
   */
  place(atS, area) {
    this.line.hidden = atS === null;
    if (atS === null) return;
    const x = area.left + ((atS - area.since) / (area.until - area.since)) * area.width;
    this.line.style.height = `${area.height}px`;
    this.line.style.transform = `translate(${x.toFixed(1)}px, ${area.top}px)`;
  }
}

/** A selection of a part of a canvas by dragging over it. Calls `onSelect(from, to)` with pixels from the left. */
export function selectByDragging(plot, canvas, onSelect) {
  const box = element("div", { class: "drag-box", hidden: "" });
  plot.append(box);
  let from = null;
  const end = () => {
    from = null;
    box.hidden = true;
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button === 0) from = event.offsetX;
  });
  canvas.addEventListener("pointermove", (event) => {
    if (from === null) return;
    if (event.buttons !== 1) return end();
    const [left, right] = [Math.min(from, event.offsetX), Math.max(from, event.offsetX)];
    box.hidden = right - left < 4;
    box.style.left = `${left}px`;
    box.style.width = `${right - left}px`;
    if (!box.hidden && !canvas.hasPointerCapture(event.pointerId)) canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", (event) => {
    const isDrag = from !== null && !box.hidden;
    const [left, right] = [Math.min(from, event.offsetX), Math.max(from, event.offsetX)];
    end();
    if (isDrag) onSelect(left, right);
  });
  canvas.addEventListener("pointercancel", end);
}
