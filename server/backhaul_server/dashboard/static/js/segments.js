// The table of segments. The dashboard sorts, filters and pages, so ten thousand rows are as fast as ten.

import { byId, element, explain, setOptions, setText } from "./dom.js";
import { bytes, count, drift, duration, milliseconds, NONE, runName } from "./format.js";
import { ask, pathTo, Poll } from "./poll.js";
import { Table } from "./table.js";

const PAGE = 50;
const DEBOUNCE_MS = 200;
const LONGEST_REASON = 70; // in the list to choose from
const state = { run: "", filter: "", reason: "", sort: "segment", descending: false, offset: 0 };
let table = null;
let poll = null;
let total = 0;
let nowS = 0;

const problem = (field) => (cell, row) => {
  setText(cell, count(row[field]));
  cell.classList.toggle("errors", row[field] > 0);
};

const COLUMNS = [
  { title: "Segment", sort: "segment", isText: true, paint: paintName },
  { title: "Calls", sort: "calls", cell: (row) => count(row.calls) },
  { title: "Sent", sort: "up_bytes", cell: (row) => bytes(row.up_bytes) },
  { title: "Received", sort: "down_bytes", cell: (row) => bytes(row.down_bytes) },
  { title: "Local", sort: "local_ms", cell: (row) => milliseconds(row.local_ms), hint: "Median forward time on the trainer" },
  { title: "Remote", sort: "remote_ms", cell: (row) => (row.remote_ms ? milliseconds(row.remote_ms) : NONE), hint: "Median time of recomputation and backward on a worker" },
  { title: "Wait", sort: "wait_ms", cell: (row) => milliseconds(row.wait_ms), hint: "Median time that backward was blocked by the segment" },
  { title: "Overhead", sort: "overhead_ms", cell: (row) => milliseconds(row.overhead_ms), hint: "Median time of recording, digests and sending on the trainer" },
  { title: "Decision", sort: "decision", isText: true, paint: paintDecision },
  { title: "Why", sort: "reason", isText: true, className: "wrap", paint: paintWhy, hint: "Reason of the last call, and of earlier calls that got no gradients from a worker" },
  { title: "Worker", sort: "worker", isText: true, cell: (row) => row.worker || NONE },
  { title: "Fallbacks", sort: "fallbacks", paint: problem("fallbacks") },
  { title: "Mismatches", sort: "mismatches", paint: problem("mismatches"), hint: "Recomputations whose values the trainer rejected" },
  { title: "Drift", sort: "drift", cell: (row) => drift(row.drift), hint: "Relative difference from the trainer's numbers; 0 if all bits are equal" },
  { title: "Retries", sort: "retries", cell: (row) => count(row.retries) },
];

function paintName(cell, row) {
  if (cell.firstChild === null) cell.append(element("span"), element("span", { class: "sub", title: "Run" }));
  setText(cell.firstChild, row.segment);
  setText(cell.lastChild, runName(row.run));
}

/** Shows the reason of the last call, then the other reasons with their number of calls and the age of the last. */
function paintWhy(cell, row) {
  const kept = new Map(row.reasons.map((one) => [one.reason, one]));
  const reasons = [...new Set([...(row.reason ? [row.reason] : []), ...kept.keys()])];
  const lines = reasons.map((reason) => {
    const one = kept.get(reason);
    return [reason, one ? `${count(one.calls)} ${one.calls === 1 ? "call" : "calls"}, last ${duration(nowS - one.last_at_s)} ago` : "", one?.is_fallback ?? false];
  });
  const signature = JSON.stringify(lines);
  if (cell.dataset.shown === signature) return;
  cell.dataset.shown = signature;
  const nodes = lines.map(([reason, calls, isFallback]) =>
    element("span", { class: "why" }, element("span", isFallback ? { class: "errors" } : {}, reason), ...(calls ? [element("span", { class: "sub" }, calls)] : [])),
  );
  cell.replaceChildren(...(nodes.length ? nodes : [NONE]));
}

function paintDecision(cell, row) {
  if (cell.dataset.shown === row.decision) return;
  cell.dataset.shown = row.decision;
  cell.replaceChildren(row.decision ? element("span", { class: "badge", "data-kind": row.decision }, row.decision) : NONE);
}

function query() {
  const { run, filter, reason, sort, descending } = state;
  return { run, filter, reason, sort, descending };
}

/** Updates the controls at once; the rows follow with the next answer. */
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
  const page = await ask("/api/v1/segments", { ...query(), offset: state.offset, limit: PAGE }, signal);
  total = page.total;
  nowS = page.at_s;
  offerReasons(page.reasons);
  if (state.offset >= total && state.offset > 0) state.offset = Math.max(0, Math.floor((total - 1) / PAGE) * PAGE);
  table.update(page.rows);
  byId("segments-table").setAttribute("aria-busy", "false");
  byId("segments-table").hidden = total === 0;
  explain(
    byId("segments").querySelector(":scope > .empty"),
    total > 0
      ? ""
      : state.filter || state.run || state.reason
        ? "No segment matches these filters. Choose another word, reason or run."
        : "No segments have been reported yet. Checkpoint a block with session.checkpoint(block, x) and run a step.",
  );
  showPages();
}

/** Offers reasons for selection. The selected one stays in the list. */
function offerReasons(list) {
  const known = list.map((one) => one.reason);
  if (state.reason && !known.includes(state.reason)) known.push(state.reason);
  const short = (reason) => (reason.length > LONGEST_REASON ? `${reason.slice(0, LONGEST_REASON - 1)}…` : reason);
  setOptions(byId("segments-reason"), [["", "any"], ...known.map((reason) => [reason, short(reason)])]);
}

/** Offers the runs of a live event for selection. */
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
  byId("segments-reason").addEventListener("change", (event) => change({ reason: event.target.value }));
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
