// The table of segments. The dashboard sorts, filters and pages, so that ten thousand are as quick as ten.

import { byId, element, explain, setOptions, setText } from "./dom.js";
import { bytes, count, drift, milliseconds, NONE, runName } from "./format.js";
import { ask, pathTo, Poll } from "./poll.js";
import { Table } from "./table.js";

const PAGE = 50;
const DEBOUNCE_MS = 200;
const state = { run: "", filter: "", sort: "segment", descending: false, offset: 0 };
let table = null;
let poll = null;
let total = 0;

const problem = (field) => (cell, row) => {
  setText(cell, count(row[field]));
  cell.classList.toggle("errors", row[field] > 0);
};

const COLUMNS = [
  { title: "Segment", sort: "segment", isText: true, paint: paintName },
  { title: "Calls", sort: "calls", cell: (row) => count(row.calls) },
  { title: "Sent", sort: "up_bytes", cell: (row) => bytes(row.up_bytes) },
  { title: "Received", sort: "down_bytes", cell: (row) => bytes(row.down_bytes) },
  { title: "Local", sort: "local_ms", cell: (row) => milliseconds(row.local_ms), hint: "Median of its forward on the trainer" },
  { title: "Remote", sort: "remote_ms", cell: (row) => (row.remote_ms ? milliseconds(row.remote_ms) : NONE), hint: "Median of recompute and backward on a worker" },
  { title: "Wait", sort: "wait_ms", cell: (row) => milliseconds(row.wait_ms), hint: "Median that backward stood still for it" },
  { title: "Overhead", sort: "overhead_ms", cell: (row) => milliseconds(row.overhead_ms), hint: "Median of recording, digests and sending" },
  { title: "Decision", sort: "decision", isText: true, paint: paintDecision },
  { title: "Why", sort: "reason", isText: true, className: "wrap", cell: (row) => row.reason || NONE },
  { title: "Worker", sort: "worker", isText: true, cell: (row) => row.worker || NONE },
  { title: "Fallbacks", sort: "fallbacks", paint: problem("fallbacks") },
  { title: "Mismatches", sort: "mismatches", paint: problem("mismatches"), hint: "Recomputations whose values were refused" },
  { title: "Drift", sort: "drift", cell: (row) => drift(row.drift), hint: "Relative difference to the trainer's numbers, 0 for equal bits" },
  { title: "Retries", sort: "retries", cell: (row) => count(row.retries) },
];

function paintName(cell, row) {
  if (cell.firstChild === null) cell.append(element("span"), element("span", { class: "sub", title: "Run" }));
  setText(cell.firstChild, row.segment);
  setText(cell.lastChild, runName(row.run));
}

function paintDecision(cell, row) {
  if (cell.dataset.shown === row.decision) return;
  cell.dataset.shown = row.decision;
  cell.replaceChildren(row.decision ? element("span", { class: "badge", "data-kind": row.decision }, row.decision) : NONE);
}

function query() {
  const { run, filter, sort, descending } = state;
  return { run, filter, sort, descending };
}

/** Answers at once with what is known already; rows follow. */
function change(changes) {
  Object.assign(state, { offset: 0 }, changes);
  table.showSort(state.sort, state.descending);
  byId("segments-table").setAttribute("aria-busy", "true");
  byId("segments-csv").href = pathTo("/api/v1/segments.csv", query());
  showPages();
  poll.now();
}

function showPages() {
  const last = Math.min(state.offset + PAGE, total);
  setText(byId("segments-count"), total === 0 ? "" : `${count(state.offset + 1)}–${count(last)} of ${count(total)}`);
  byId("segments-previous").disabled = state.offset === 0;
  byId("segments-next").disabled = state.offset + PAGE >= total;
}

async function refresh(signal) {
  const found = await ask("/api/v1/segments", { ...query(), offset: state.offset, limit: PAGE }, signal);
  total = found.total;
  if (state.offset >= total && state.offset > 0) state.offset = Math.max(0, Math.floor((total - 1) / PAGE) * PAGE);
  table.update(found.rows);
  byId("segments-table").setAttribute("aria-busy", "false");
  byId("segments-table").hidden = total === 0;
  explain(
    byId("segments").querySelector(":scope > .empty"),
    total > 0
      ? ""
      : state.filter || state.run
        ? "No segment matches. Take another word, or another run."
        : "No segment was told yet. Checkpoint a block with session.checkpoint(block, x) and run a step.",
  );
  showPages();
}

/** Runs to choose from; of each live event. */
export function offerRuns(runs) {
  const chosen = setOptions(byId("segments-run"), [["", "all"], ...runs.map((run) => [run.run, `${runName(run.run)} (${run.trainer})`])]);
  if (chosen !== state.run) change({ run: chosen });
}

export function startSegments() {
  table = new Table(byId("segments-table"), COLUMNS, (row) => `${row.run}\n${row.segment}`, {
    onSort: (field) => change({ sort: field, descending: state.sort === field && !state.descending }),
  });
  poll = new Poll(byId("segments"), 2000, refresh);
  byId("segments-run").addEventListener("change", (event) => change({ run: event.target.value }));
  let timer = 0;
  byId("segments-filter").addEventListener("input", (event) => {
    clearTimeout(timer);
    timer = setTimeout(() => change({ filter: event.target.value.trim() }), DEBOUNCE_MS);
  });
  for (const [id, pages] of [["segments-previous", -1], ["segments-next", 1]]) {
    byId(id).addEventListener("click", () => {
      change({ offset: Math.max(0, state.offset + pages * PAGE) });
      byId("segments-table").closest(".scroll").scrollTop = 0;
    });
  }
  change({});
}
