// The table of segments. The dashboard sorts, filters and pages, so ten thousand rows are as fast as ten.

import { bind, offer, onChange, state } from "./address.js";
import { byId, element, explain } from "./dom.js";
import { bytes, count, drift, duration, milliseconds, NONE } from "./format.js";
import { OffsetPages } from "./pages.js";
import { ask, pathTo, Poll } from "./poll.js";
import { chosenRun, chosenRuns, nameWithRank, onScope } from "./scope.js";
import { problems, sub, Table } from "./table.js";

const PAGE = 50;
const LONGEST_REASON = 70; // in the list to choose from
let table = null;
let poll = null;
let pages = null;
let nowS = 0;

const COLUMNS = [
  { title: "Segment", sort: "segment", isText: true, cell: (row) => [element("span", {}, row.segment), sub(nameWithRank(row.run))] },
  { title: "Calls", sort: "calls", cell: (row) => count(row.calls) },
  { title: "Sent", sort: "up_bytes", cell: (row) => bytes(row.up_bytes) },
  { title: "Received", sort: "down_bytes", cell: (row) => bytes(row.down_bytes) },
  { title: "Local", sort: "local_ms", cell: (row) => milliseconds(row.local_ms), hint: "Median forward time on the trainer" },
  { title: "Remote", sort: "remote_ms", cell: (row) => (row.remote_ms ? milliseconds(row.remote_ms) : NONE), hint: "Median time of recomputation and backward on a worker" },
  { title: "Wait", sort: "wait_ms", cell: (row) => milliseconds(row.wait_ms), hint: "Median time that backward was blocked by the segment" },
  { title: "Overhead", sort: "overhead_ms", cell: (row) => milliseconds(row.overhead_ms), hint: "Median time of recording, digests and sending on the trainer" },
  { title: "Decision", sort: "decision", isText: true, cell: ({ decision }) => (decision ? element("span", { class: "badge", "data-kind": decision }, decision) : NONE) },
  { title: "Why", sort: "reason", isText: true, className: "wrap", cell: whyOf, hint: "Reason of the last call, and of earlier calls that got no gradients from a worker" },
  { title: "Program", sort: "known", isText: true, className: "wrap", cell: programOf, hint: "Whether calls were recorded, or their program was known; how many programs there are, and what torch.compile did" },
  { title: "Worker", sort: "worker", isText: true, cell: (row) => row.worker || NONE },
  problems("Fallbacks", "fallbacks", { sort: "fallbacks" }),
  problems("Mismatches", "mismatches", { sort: "mismatches", hint: "Recomputations whose values the trainer rejected" }),
  { title: "Drift", sort: "drift", cell: (row) => drift(row.drift), hint: "Relative difference from the trainer's numbers; 0 if all bits are equal" },
  { title: "Retries", sort: "retries", cell: (row) => count(row.retries) },
];

/** Returns the reason of the last call, then the other reasons with their number of calls and the age of the last. */
function whyOf(row) {
  const byReason = new Map(row.reasons.map((one) => [one.reason, one]));
  const reasons = [...new Set([...(row.reason ? [row.reason] : []), ...byReason.keys()])];
  const nodes = reasons.map((reason) => {
    const one = byReason.get(reason);
    const calls = one ? `${count(one.calls)} ${one.calls === 1 ? "call" : "calls"}, last ${duration(nowS - one.last_at_s)} ago` : "";
    return element("span", { class: "why" }, element("span", one?.is_fallback ? { class: "errors" } : {}, reason), sub(calls));
  });
  return nodes.length ? nodes : NONE;
}

/** Returns how the programs of a segment were found, and how often each reason for more work was given. */
function programOf(row) {
  const recorded = row.calls - row.known;
  const said = [`${row.known ? `${count(row.known)} known, ` : ""}${count(recorded)} recorded`];
  if (row.programs > 1) said.push(`${count(row.programs)} programs`);
  if (row.compilations) said.push(`compiled ${count(row.compilations)}× in ${milliseconds(1e3 * row.compile_s)}`);
  const listed = (title, list) => list.map(({ text, times }) => element("span", { class: "why" }, `${title}: ${text}`, sub(`${count(times)}×`)));
  return [element("span", {}, said[0]), sub(said.slice(1).join(", ")), ...listed("recorded", row.recorded), ...listed("compiled again", row.recompiled)];
}

function query() {
  return { runs: chosenRun() === "" ? [] : chosenRuns(), filter: state("filter"), reason: state("reason"), sort: state("sort"), descending: state("order") === "down" };
}

/** Updates the controls at once; the rows follow with the next answer. */
function begin() {
  pages.turnTo(0);
  turn();
}

function turn() {
  showQuery();
  poll.now();
}

function showQuery() {
  table.showSort();
  byId("segments-table").setAttribute("aria-busy", "true");
  byId("segments-csv").href = pathTo("api/v1/segments.csv", query());
}

async function refresh(signal) {
  const page = await ask("api/v1/segments", { ...query(), ...pages.query }, signal);
  nowS = page.at_s;
  offerReasons(page.reasons);
  if (page.rows.length === 0 && page.total > 0) pages.turnTo(page.total - 1); // fewer rows match than before
  table.update(page.rows, page.total > 0 ? "" : whyEmpty(page.note));
  byId("segments-table").setAttribute("aria-busy", "false");
  explain(byId("segments-note"), page.total > 0 ? page.note : "");
  pages.show(page);
}

/** Returns why there are no rows, given the sentence on runs whose segments are not kept. */
function whyEmpty(note) {
  if (state("filter") || state("reason")) return ["No segment matches these filters. Choose another word, reason or run.", note].filter(Boolean).join(" ");
  if (note) return note;
  const none = chosenRun() ? "No segment of this run has been reported yet." : "No segments have been reported yet.";
  return `${none} Checkpoint a block with session.checkpoint(block, x) and run a step.`;
}

function showRefusal(sentence) {
  table.update([], `The segments of this run cannot be shown: ${sentence}.`);
  explain(byId("segments-note"), "");
  pages.show({ offset: 0, rows: [], total: 0 });
}

/** Offers reasons for selection. The selected one stays in the list. */
function offerReasons(list) {
  const short = (reason) => (reason.length > LONGEST_REASON ? `${reason.slice(0, LONGEST_REASON - 1)}…` : reason);
  offer(byId("segments-reason"), "reason", "any", list.map(({ reason }) => [reason, short(reason)]));
}

export function startSegments() {
  table = new Table(byId("segments-table"), COLUMNS, (row) => `${row.run}\n${row.segment}`, { sortedBy: ["sort", "order"] });
  pages = new OffsetPages(table, "segments", PAGE, turn);
  poll = new Poll(byId("segments"), 2000, refresh, { onRefused: showRefusal });
  bind(byId("segments-reason"), "reason");
  bind(byId("segments-filter"), "filter");
  onChange(["filter", "reason", "sort", "order"], begin);
  onScope(begin);
  showQuery();
}
