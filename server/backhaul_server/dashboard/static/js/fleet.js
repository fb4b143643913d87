// The tables of workers and of their sessions, updated by each live event.

import { bind, change, onChange, state } from "./address.js";
import { byId, element } from "./dom.js";
import { ago, bytes, bytesOf, count, date, drift, duration, NONE, percent } from "./format.js";
import { LocalPages } from "./pages.js";
import { inScope, nameWithRank, onScope } from "./scope.js";
import { facts, meter, stateOf, sub, Table } from "./table.js";

const ROWS_OF_A_PAGE = 50;
const STATES = ["unreachable", "draining", "serving"]; // the order by state: what needs attention first
let workers = null;
let sessions = null;
let pagesOfWorkers = null;
let pagesOfSessions = null;
let last = null; // the last live event
let nowS = 0;

/** Whether the last numbers of a worker are those of now. */
function isCurrent(worker) {
  return worker.state !== "unreachable";
}

/** Returns the dashboard's time of the last live event, in seconds since 1970; 0 before the first. */
export function timeOfNumbers() {
  return nowS;
}

/** Returns what the last live event said of a worker; undefined if it is not watched, or before the first event. */
export function workerAt(address) {
  return last?.workers.find((worker) => worker.address === address);
}

/** Returns how old the numbers of a worker are that is unreachable: "last answer 4 min ago"; "" while it answers. */
export function ageOf(worker) {
  if (isCurrent(worker)) return "";
  return worker.seen_at_s === 0 ? "never answered" : `last answer ${ago(worker.seen_at_s, nowS)}`;
}

/** Returns the state of a worker, what is wrong with it, and how old its numbers are if they are not those of now. */
function stateCell(worker) {
  const isOld = !isCurrent(worker) && worker.seen_at_s > 0;
  return [stateOf(worker.state), sub(worker.error || worker.last_error, "errors"), sub(isOld ? `its numbers are ${duration(nowS - worker.seen_at_s)} old` : "")];
}

/** Returns a share of a worker as a bar, and below it when it was measured if that is not now. */
function shareCell(worker, share, text, options) {
  if (share === null) return NONE;
  const isNow = isCurrent(worker);
  return [meter(share, text, { ...options, ...(isNow ? {} : { warns: false }) }), sub(isNow ? "" : ago(worker.seen_at_s, nowS))];
}

function gpuCell(worker) {
  const share = worker.accelerator?.utilization ?? null;
  return shareCell(worker, share, percent(share), { warns: false }); // a busy GPU is what a worker is for
}

function gpuMemory(worker) {
  const gpu = worker.accelerator;
  return gpu ? gpu.used_bytes / gpu.total_bytes : null;
}

function gpuMemoryCell(worker) {
  const gpu = worker.accelerator;
  return shareCell(worker, gpuMemory(worker), gpu ? bytesOf(gpu.used_bytes, gpu.total_bytes) : "");
}

/** A column of numbers of a worker's last answer: of a worker that is unreachable they are old, and sorted last. */
function measured(column) {
  const cell = (worker) => (worker.seen_at_s === 0 ? NONE : column.cell(worker));
  return { ...column, cell, isMeasured: true, className: `measured ${column.className ?? ""}`.trim() };
}

/** The columns of workers. `by(worker)` is the value that a column sorts by: a number, or null where there is none. */
const WORKERS = [
  { title: "Worker", sort: "address", by: (worker) => worker.address, isText: true, cell: (worker) => worker.address },
  { title: "State", sort: "state", by: (worker) => STATES.indexOf(worker.state), isText: true, className: "wrap", cell: stateCell },
  { title: "Last seen", sort: "seen", by: (worker) => nowS - worker.seen_at_s, cell: (worker) => (worker.seen_at_s === 0 ? "never" : ago(worker.seen_at_s, nowS)), hint: "When the worker last answered" },
  measured({ title: "Memory", sort: "memory", by: (worker) => worker.memory_share, isText: true, cell: (worker) => shareCell(worker, worker.memory_share, `${percent(worker.memory_share)} of ${bytes(worker.memory.budget_bytes)}`), hint: "Share of the worker's budget that is in use, the cache included" }),
  measured({ title: "Sessions", sort: "sessions", by: (worker) => worker.sessions, cell: (worker) => count(worker.sessions), hint: "Trainers that are connected to the worker" }),
  measured({ title: "Recomputed", sort: "recomputed", by: (worker) => worker.recomputed_segments, cell: (worker) => count(worker.recomputed_segments), hint: "Segments that the worker has recomputed since it started" }),
  measured({ title: "Received", sort: "received", by: (worker) => worker.received_bytes, cell: (worker) => bytes(worker.received_bytes), hint: "Bytes since the worker started" }),
  measured({ title: "Sent", sort: "sent", by: (worker) => worker.sent_bytes, cell: (worker) => bytes(worker.sent_bytes), hint: "Bytes since the worker started" }),
  measured({ title: "Queued", sort: "queued", by: (worker) => worker.queued_requests, cell: (worker) => count(worker.queued_requests), hint: "Requests that wait or run" }),
  measured({ title: "GPU", sort: "gpu", by: (worker) => worker.accelerator?.utilization ?? null, isText: true, className: "gpu", cell: gpuCell, hint: "How busy the worker's GPU is, by NVML" }),
  measured({ title: "GPU memory", sort: "gpu_memory", by: gpuMemory, isText: true, className: "gpu", cell: gpuMemoryCell, hint: "Memory in use on the worker's GPU, by all processes" }),
  measured({ title: "Up", sort: "up", by: (worker) => worker.uptime_s, cell: (worker) => duration(worker.uptime_s), hint: "Time since the worker started" }),
];

function workerDetails(worker) {
  if (worker.seen_at_s === 0) return [element("p", { class: "notes" }, "This worker has never answered, so nothing is known of it.")];
  const { memory } = worker;
  return [
    facts({
      ...(isCurrent(worker) ? {} : { "As of": date(worker.seen_at_s, true) }),
      Device: worker.device || NONE,
      Version: worker.version || NONE,
      ...(worker.accelerator ? { GPU: worker.accelerator.name } : {}),
      Epoch: worker.epoch || NONE,
      Segments: bytes(memory.segment_bytes),
      Working: bytes(memory.working_bytes),
      Results: bytes(memory.result_bytes),
      Reserve: bytes(memory.reserve_bytes),
      Cached: bytes(memory.cached_bytes),
      "Whole process": bytes(memory.resident_bytes),
      Refusals: count(memory.refusals),
      Evictions: count(memory.evictions),
      ...(worker.last_error ? { "Last error": `${worker.last_error} (${date(worker.last_error_at_s)})` } : {}),
    }),
    facts(Object.keys(worker.fingerprint).length ? worker.fingerprint : { Fingerprint: "not reported" }),
  ];
}

const SESSIONS = [
  { title: "Run", isText: true, cell: (session) => nameWithRank(session.run) },
  { title: "Trainer", isText: true, cell: (session) => session.trainer },
  { title: "Worker", isText: true, cell: (session) => session.worker },
  { title: "Last seen", cell: (session) => `${duration(session.idle_s)} ago`, hint: "When the worker last got a request of the session" },
  { title: "Quota", isText: true, cell: (session) => meter(session.quota_share, `${percent(session.quota_share)}, ${bytes(session.held_bytes)}`), hint: "Bytes that the session's segments name, as a share of the worker's budget" },
  { title: "Segments", cell: (session) => count(session.segments) },
  { title: "Drift", cell: (session) => drift(session.drift), hint: "Relative difference from the trainer's numbers; 0 if all bits are equal" },
  { title: "Version", isText: true, cell: (session) => session.client_version },
  { title: "Last error", isText: true, className: "wrap", cell: (session) => session.last_error || NONE, hasErrors: (session) => session.last_error !== "" },
];

export function showFleet(live) {
  last = live;
  show();
}

function show() {
  if (last === null) return;
  nowS = last.overview.at_s;
  byId("workers").classList.toggle("has-gpu", last.workers.some((worker) => worker.accelerator));
  workers.showSort();
  workers.update(
    pagesOfWorkers.of(ordered(last.workers.filter(isWanted))),
    last.workers.length ? "No worker matches. Choose another word." : "No worker is being watched. Start the dashboard with --worker ADDRESS.",
  );
  const isChosen = inScope();
  sessions.update(
    pagesOfSessions.of(last.sessions.filter((session) => isChosen(session.run))),
    last.sessions.length ? "The chosen run is not connected to any worker." : "No trainer is connected. Connect one with backhaul.connect(\"ADDRESS\").",
  );
}

/** Whether a worker contains the text of the filter: in what its row shows, or in what tells machines apart. */
function isWanted(worker) {
  const wanted = state("workers-filter").toLowerCase();
  const texts = [worker.address, worker.state, worker.error, worker.last_error, worker.device, worker.version, worker.accelerator?.name ?? ""];
  return wanted === "" || texts.some((text) => text.toLowerCase().includes(wanted));
}

/**
 * Returns the workers in the chosen order, or in that of the command line. Workers without a value come last, and so do
 * those whose value is not the one of now.
 */
function ordered(list) {
  const column = WORKERS.find((one) => one.sort === state("workers"));
  if (column === undefined) return list;
  const by = (worker) => (column.isMeasured && !isCurrent(worker) ? null : column.by(worker));
  const sign = state("workers-order") === "down" ? -1 : 1;
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  const [known, unknown] = [true, false].map((isKnown) => list.filter((worker) => (by(worker) !== null) === isKnown));
  return [...known.sort((a, b) => sign * compare(by(a), by(b))), ...unknown];
}

/** Has the page show a worker: its memory and latency in the charts, and its row in the table, unfolded. */
export function goToWorker(address) {
  const isHidden = last !== null && last.workers.some((worker) => worker.address === address && !isWanted(worker));
  change({ memory: `worker ${address}`, worker: address, ...(isHidden ? { "workers-filter": "" } : {}) });
  const index = last === null ? -1 : ordered(last.workers.filter(isWanted)).findIndex((worker) => worker.address === address);
  if (index < 0) return;
  pagesOfWorkers.turnTo(index);
  show();
  workers.reveal(address);
}

export function startFleet() {
  workers = new Table(byId("workers"), WORKERS, (worker) => worker.address, {
    details: workerDetails,
    level: (worker) => (isCurrent(worker) ? null : "bad"),
    sortedBy: ["workers", "workers-order"],
  });
  sessions = new Table(byId("sessions"), SESSIONS, (session) => `${session.worker}\n${session.run}\n${session.trainer}`);
  pagesOfWorkers = new LocalPages(workers, "workers", ROWS_OF_A_PAGE, show);
  pagesOfSessions = new LocalPages(sessions, "sessions", ROWS_OF_A_PAGE, show);
  bind(byId("workers-filter"), "workers-filter");
  onScope(show);
  onChange(["workers", "workers-order"], show);
  onChange(["workers-filter"], () => {
    pagesOfWorkers.turnTo(0);
    show();
  });
}
