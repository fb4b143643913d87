// The table of segments. The dashboard sorts, filters and pages, so ten thousand rows are as fast as ten.

import { bind, change, onChange, state } from "./address.js";
import { byId, element, explain, setOptions, setText } from "./dom.js";
import { bytes, count, drift, duration, milliseconds, NONE } from "./format.js";
import { ask, pathTo, Poll } from "./poll.js";
import { chosenRun, chosenRuns, nameWithRank, onScope } from "./scope.js";
import { Table } from "./table.js";

const PAGE = 50;
const DEBOUNCE_MS = 200; // between typed letters
const LONGEST_REASON = 70; // in the list to choose from
let offset = 0;
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
  setText(cell.lastChild, nameWithRank(row.run));
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
  return { runs: chosenRun() === "" ? [] : chosenRuns(), filter: state("filter"), reason: state("reason"), sort: state("sort"), descending: state("order") === "down" };
}

/** Updates the controls at once; the rows follow with the next answer. */
function begin() {
  offset = 0;
  showQuery();
  poll.now();
}

function showQuery() {
  table.showSort(state("sort"), state("order") === "down");
  byId("segments-table").setAttribute("aria-busy", "true");
  byId("segments-csv").href = pathTo("api/v1/segments.csv", query());
  showPages();
}

function showPages() {
  const last = Math.min(offset + PAGE, total);
  setText(byId("segments-count"), total === 0 ? "" : `${count(offset + 1)}–${count(last)} of ${count(total)}`);
  byId("segments-previous").disabled = offset === 0;
  byId("segments-next").disabled = offset + PAGE >= total;
}

async function refresh(signal) {
  const page = await ask("api/v1/segments", { ...query(), offset, limit: PAGE }, signal);
  total = page.total;
  nowS = page.at_s;
  offerReasons(page.reasons);
  if (offset >= total && offset > 0) offset = Math.max(0, Math.floor((total - 1) / PAGE) * PAGE);
  table.update(page.rows);
  byId("segments-table").setAttribute("aria-busy", "false");
  byId("segments-table").hidden = total === 0;
  explain(byId("segments-note"), total > 0 ? page.note : "");
  explain(byId("segments").querySelector(":scope > .empty"), total > 0 ? "" : whyEmpty(page.note));
  showPages();
}

/** Returns why there are no rows, given the sentence on runs whose segments are not kept. */
function whyEmpty(note) {
  if (state("filter") || state("reason")) return ["No segment matches these filters. Choose another word, reason or run.", note].filter(Boolean).join(" ");
  if (note) return note;
  const none = chosenRun() ? "No segment of this run has been reported yet." : "No segments have been reported yet.";
  return `${none} Checkpoint a block with session.checkpoint(block, x) and run a step.`;
}

function showRefusal(sentence) {
  total = 0;
  table.update([]);
  byId("segments-table").hidden = true;
  explain(byId("segments-note"), "");
  explain(byId("segments").querySelector(":scope > .empty"), `The segments of this run cannot be shown: ${sentence}.`);
  showPages();
}

/** Offers reasons for selection. The selected one stays in the list. */
function offerReasons(list) {
  const known = list.map((one) => one.reason);
  if (state("reason") && !known.includes(state("reason"))) known.push(state("reason"));
  const short = (reason) => (reason.length > LONGEST_REASON ? `${reason.slice(0, LONGEST_REASON - 1)}…` : reason);
  setOptions(byId("segments-reason"), [["", "any"], ...known.map((reason) => [reason, short(reason)])]);
  byId("segments-reason").value = state("reason");
}

export function startSegments() {
  table = new Table(byId("segments-table"), COLUMNS, (row) => `${row.run}\n${row.segment}`, {
    onSort: (field) => change({ sort: field, order: state("sort") === field && state("order") === "" ? "down" : "" }),
  });
  poll = new Poll(byId("segments"), 2000, refresh, showRefusal);
  bind(byId("segments-reason"), "reason");
  bind(byId("segments-filter"), "filter");
  let timer = 0;
  onChange(["filter"], () => {
    clearTimeout(timer);
    timer = setTimeout(begin, DEBOUNCE_MS);
  });
  onChange(["reason", "sort", "order"], begin);
  onScope(begin);
  for (const [id, pages] of [["segments-previous", -1], ["segments-next", 1]]) {
    byId(id).addEventListener("click", () => {
      offset = Math.max(0, offset + pages * PAGE);
      showQuery();
      poll.now();
      byId("segments-table").closest(".scroll").scrollTop = 0;
    });
  }
  showQuery();
}
