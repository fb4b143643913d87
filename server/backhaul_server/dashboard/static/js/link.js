// How charts take part in the shared cursors and in zooming: `to` and `from` translate between x values and what is
// shared, given the x values of the chart's points, and `select` is called with the shared values of a dragged part.

import { change } from "./address.js";
import { stepCursor, timeCursor } from "./cursor.js";
import { chooseRange } from "./range.js";

/** For charts over time. */
export const overTime = { cursor: timeCursor, to: (x) => x, from: (atS) => atS, select: chooseRange };

/** For the charts that compare runs: they share steps, because the runs were at other times. */
export const overSteps = {
  cursor: stepCursor,
  to: (x) => x,
  from: (step) => step,
  select: (first, last) => change({ between: `${Math.floor(first)}-${Math.ceil(last)}` }),
};

/**
 * For a chart over the steps of one run, which are at known times.
 * @param {() => number[]} times returns when each step of the chart began, in seconds since 1970
 */
export function overTimedSteps(times) {
  const to = (x, steps) => {
    const at = times();
    if (at.length === 0) return null;
    const next = steps.findIndex((step) => step >= x);
    if (next <= 0) return at[next < 0 ? at.length - 1 : 0];
    return at[next - 1] + ((x - steps[next - 1]) / (steps[next] - steps[next - 1])) * (at[next] - at[next - 1]);
  };
  const from = (atS, steps) => {
    const at = times();
    const last = at.findLastIndex((one) => one <= atS);
    const isOver = last === at.length - 1 && last > 0 && atS - at[last] > 2 * (at[last] - at[last - 1]);
    return last < 0 || isOver ? null : steps[last];
  };
  return { cursor: timeCursor, to, from, select: chooseRange };
}
