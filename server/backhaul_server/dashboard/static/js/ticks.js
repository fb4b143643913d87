// Where heat maps write times below their columns: at round times, as the other charts do.

import { clock } from "./format.js";

/** The distances between labels, in seconds. */
export const TIME_STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 43_200, 86_400];
const ROOM = 84; // pixels for a label and the space beside it
const HALF_LABEL = 28;

/**
 * Writes round times below an area.
 * @param {CanvasRenderingContext2D} context whose font and colour are set
 * @param {{left: number, width: number, bottom: number, since: number, until: number}} area in CSS pixels, and the times at
 *   its edges in seconds
 * @param {number} edge x at which the canvas ends, beyond which no label may reach
 */
export function drawTimes(context, { left, width, bottom, since, until }, edge) {
  const most = Math.max(1, Math.floor(width / ROOM));
  const step = TIME_STEPS_S.find((one) => (until - since) / one <= most) ?? TIME_STEPS_S.at(-1);
  context.textBaseline = "top";
  context.textAlign = "center";
  for (let at = Math.ceil(since / step) * step; at <= until; at += step) {
    const x = left + ((at - since) / (until - since)) * width;
    if (x + HALF_LABEL <= edge) context.fillText(clock(at), x, bottom + 7);
  }
}
