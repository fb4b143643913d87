// How plots take part in a shared cursor and in zooming: `cursor` is what they share, a time or a step; `to` and `from`
// translate between it and x values, given those of the plot's points; `select` is called with the shared values of a
// dragged part; and `isTimed` says that events can be marked, because all x values have times.

import { change } from "./address.js";
import { chooseRange } from "./range.js";

/** A position that plots share: what is pointed at in one of them is marked at the same place in the others. */
class Cursor {
  plots = new Set();
  value = null;

  /** Has `showCursor(value)` of a plot called when another one is pointed at, with null when none is. */
  add(plot) {
    this.plots.add(plot);
  }

  /** Moves the cursor of all plots other than the one that is pointed at; null removes it. */
  point(value, source) {
    if (value === this.value) return;
    this.value = value;
    for (const plot of this.plots) {
      if (plot !== source) plot.showCursor(value);
    }
  }
}

/** For charts over time, in seconds since 1970. */
export const overTime = { cursor: new Cursor(), to: (x) => x, from: (atS) => atS, select: chooseRange, isTimed: true };

/** For the charts that compare runs: they share steps, because the runs were at other times. */
export const overSteps = {
  cursor: new Cursor(),
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
  return { ...overTime, to, from, isTimed: false };
}
