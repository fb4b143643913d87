// Arranges the bars of the timeline in rows: by run, by phase or micro-batch, and by worker. No two bars of a row overlap.

const LANES = [
  ["forward", "forward"],
  ["wait", "wait"],
  ["trainer", "recompute here"],
  ["upload", "upload"],
  ["queue", "queue"],
  ["recompute", "recompute"],
  ["backward", "backward"],
  ["download", "download"],
];
const COMPUTING = new Set(["forward", "trainer", "recompute", "backward"]);
const LOWEST_ROW = 19;
const LOWEST_ROW_OF_MANY = 11; // of several runs, whose rows would else fill screens
const HIGHEST_ROW = 28;
const WANTED_HEIGHT = 400;
const ROW_GAP = 2;
const GROUP_GAP = 7;
const MOST_ROWS = 40; // with more, the workers of a group share rows

/** Height of the line with the steps, above all rows. */
export const HEAD = 22;

/** Height of the line with the title of a run, where there are several. */
export const RUN_HEAD = 24;

/** Returns the micro-batches of a timeline, from 1; none if its steps have no accumulation block. */
export function microBatchesOf(timeline) {
  return [...new Set(timeline.calls.map((call) => call.micro_batch))].filter(Boolean).sort((a, b) => a - b);
}

/**
 * Arranges a timeline.
 * @param {object} timeline as the API returns it
 * @param {boolean} byMicroBatch whether to group bars by micro-batch instead of by phase, if there are any
 * @param {(run: object) => string} titleOf returns the line above the rows of a run, where there are several
 * @returns {object} `rows`: [{label, worker, y, bars}], where `worker` is an index in `workers`, or -1 for several or none;
 *   `heads`: [{title, y}] of several runs; `workers`: their addresses; `rowHeight`; and `height` of all, without the axis
 */
export function layOut(timeline, byMicroBatch, titleOf) {
  const { spans, runs } = timeline;
  const workers = [...new Set(spans.map((span) => span.worker).filter(Boolean))].sort();
  const groups = groupsOf(timeline, byMicroBatch);
  const parts = runs.map((run) => {
    const own = runs.length > 1 ? spans.filter((span) => span.run === run.run) : spans;
    return { title: runs.length > 1 ? titleOf(run) : "", rows: rowsOf(own, groups, workers) };
  });
  const total = parts.reduce((sum, part) => sum + part.rows.length, 0);
  if (total > MOST_ROWS) for (const part of parts) part.rows = packed(part.rows);
  return { workers, ...stack(parts) };
}

/**
 * Returns the groups of rows, one for each lane or micro-batch: label, function that selects bars, function that names a
 * bar's row, and whether to show the group empty.
 */
function groupsOf(timeline, byMicroBatch) {
  const batches = byMicroBatch ? microBatchesOf(timeline) : [];
  if (batches.length === 0) {
    const row = (span) => `${span.worker}\n${String(span.row).padStart(4, "0")}`;
    // Recomputation on the trainer is rare and shown only where it took place.
    return LANES.map(([lane, label]) => ({ label, has: (span) => span.lane === lane, row, isShownEmpty: lane !== "trainer" }));
  }
  const { calls } = timeline;
  return batches.map((batch) => ({
    label: `micro-batch ${batch}`,
    has: (span) => calls[span.call].micro_batch === batch && COMPUTING.has(span.lane),
    row: (span) => span.worker,
    isShownEmpty: false,
  }));
}

/** Returns one row per group, worker and row of bars, and one empty row for each lane without bars. */
function rowsOf(spans, groups, workers) {
  const rows = [];
  for (const { label, has, row, isShownEmpty } of groups) {
    const barsOfRows = new Map();
    for (const span of spans.filter(has)) {
      const key = row(span);
      if (!barsOfRows.has(key)) barsOfRows.set(key, []);
      barsOfRows.get(key).push(span);
    }
    if (barsOfRows.size === 0 && isShownEmpty) barsOfRows.set("", []);
    let isFirst = true;
    for (const [key, bars] of [...barsOfRows].sort(([a], [b]) => (a < b ? -1 : 1))) {
      bars.sort((a, b) => a.start_ms - b.start_ms);
      rows.push({ label: isFirst ? label : "", worker: workers.indexOf(key.split("\n")[0]), y: 0, bars });
      isFirst = false;
    }
  }
  return rows;
}

/** Returns rows in which the bars of all workers of a group are together, as few as their times allow. */
function packed(rows) {
  const groups = [];
  for (const row of rows) {
    if (row.label) groups.push({ label: row.label, bars: [] });
    groups.at(-1).bars.push(...row.bars);
  }
  return groups.flatMap(({ label, bars }) => {
    const lists = [];
    for (const bar of bars.sort((a, b) => a.start_ms - b.start_ms)) {
      const free = lists.find((list) => list.at(-1).start_ms + list.at(-1).duration_ms <= bar.start_ms);
      if (free) free.push(bar);
      else lists.push([bar]);
    }
    return (lists.length ? lists : [[]]).map((list, i) => ({ label: i === 0 ? label : "", worker: -1, y: 0, bars: list }));
  });
}

/** Gives each row its place, and all of them a height that depends on their number. */
function stack(parts) {
  const isOfMany = parts.length > 1;
  const rows = parts.flatMap((part) => part.rows);
  const gap = isOfMany ? 0 : GROUP_GAP - ROW_GAP;
  const room = WANTED_HEIGHT - HEAD - rows.filter((row) => row.label).length * gap;
  const lowest = isOfMany ? LOWEST_ROW_OF_MANY : LOWEST_ROW;
  const rowHeight = Math.round(Math.min(HIGHEST_ROW, Math.max(lowest, room / Math.max(1, rows.length) - ROW_GAP)));
  const heads = [];
  let y = HEAD;
  for (const part of parts) {
    if (isOfMany) {
      heads.push({ title: part.title, y });
      y += RUN_HEAD;
    }
    part.rows.forEach((row, i) => {
      if (i > 0 && row.label) y += gap;
      row.y = y;
      y += rowHeight + ROW_GAP;
    });
  }
  return { rows, heads, rowHeight, height: y + GROUP_GAP };
}
