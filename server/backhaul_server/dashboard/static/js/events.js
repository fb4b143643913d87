// What has happened: the event log of workers and runs, whose events are also marked on all charts over time.

import { bind, onChange, state } from "./address.js";
import { byId, element, explain, icon, setText } from "./dom.js";
import { count, date } from "./format.js";
import { goToWorker } from "./fleet.js";
import { markEvents } from "./marks.js";
import { LocalPages } from "./pages.js";
import { ask, Poll } from "./poll.js";
import { chooseRange, fixedRange, onRange, rangeBounds } from "./range.js";
import { chooseRun, chosenName, chosenRun, chosenRuns, inScope, nameWithRank, onScope, runOf } from "./scope.js";
import { linkTo, Table } from "./table.js";

const PAGE = 25;
const MOST = 1000; // events of the range that are fetched, the newest ones
const AROUND_S = 60; // shown after a run's last report, as its end may be noticed later
const MOST_RUNS = 64; // of which the API shows events at once
const LEVELS = ["warning", "critical"]; // the least severities that can be chosen
const SHAPES = { info: "idle", warning: "warning", critical: "critical" };
let table = null;
let pages = null;
let answer = { items: [], total: 0 }; // of the range, whose events are marked on the charts
let filtered = answer; // those of them that the filters of the table leave

const COLUMNS = [
  { title: "Time", isText: true, cell: (event) => date(event.at_s, true) },
  { title: "Severity", isText: true, cell: ({ severity }) => element("span", { class: "severity", "data-severity": severity }, icon(SHAPES[severity]), element("span", {}, severity)) },
  { title: "Event", isText: true, className: "kind", cell: (event) => event.words },
  { title: "What happened", isText: true, className: "wrap wide", cell: (event) => (event.count > 1 ? `${event.text} (${count(event.count)} times)` : event.text) },
  { title: "Run", isText: true, cell: ({ run }) => linkTo(run, nameWithRank(run), "Show this run on the whole page", chooseRun) },
  { title: "Worker", isText: true, cell: ({ worker }) => linkTo(worker, worker, "Show this worker", goToWorker) },
];

function boundsOfRange() {
  const [since, until] = rangeBounds();
  return fixedRange() ? { since_s: since, until_s: until } : { since_s: Math.floor(since) };
}

/** Returns the events that concern the chosen runs, or no run in particular. */
function ofScope(events) {
  const isChosen = inScope();
  return events.filter((event) => event.run === "" || isChosen(event.run));
}

/** Returns the parameters of the filters of the table; none if there are none. The API filters all events of the range. */
function filters() {
  const severity = LEVELS.includes(state("severity")) ? state("severity") : "";
  return severity || state("events") ? { severity, filter: state("events") } : undefined;
}

/** Returns the times of the first start and of the last report of the chosen runs; null while none is chosen or known. */
function timesOfChosen() {
  const runs = chosenRun() === "" ? [] : chosenRuns().map(runOf).filter(Boolean);
  return runs.length ? [Math.min(...runs.map((run) => run.started_at_s)), Math.max(...runs.map((run) => run.heard_at_s))] : null;
}

/** Says that the events of the chosen run are not listed because it ran before or after the time range. */
function showOutside() {
  const times = timesOfChosen();
  const [since, until] = rangeBounds();
  const isOutside = times !== null && (times[1] < since || (fixedRange() !== null && times[0] > until));
  byId("events-outside").hidden = !isOutside;
  if (!isOutside) return;
  const [from, to] = times.map((atS) => date(atS, true));
  setText(byId("events-outside").firstElementChild, `${chosenName()} ran from ${from} to ${to}, outside of this time range, so its own events are not listed.`);
}

function show() {
  showOutside();
  const events = ofScope(answer.items);
  const shown = ofScope(filtered.items);
  markEvents(events);
  table.update(
    pages.of(shown),
    events.length > 0
      ? "No event matches these filters. Choose another word or severity."
      : "Nothing has happened in this time range: no run began or ended, no worker was lost or joined, and no segment fell back.",
  );
  const which = filtered === answer ? "events" : "events that match";
  const leftOut = `The range has ${count(filtered.total)} ${which}, of which the newest ${count(filtered.items.length)} are shown. Choose a shorter time range for the others.`;
  explain(byId("events-left-out"), filtered.total > filtered.items.length ? leftOut : "");
}

async function refresh(signal) {
  const range = { runs: chosenRun() === "" ? [] : chosenRuns().slice(0, MOST_RUNS), ...boundsOfRange(), limit: MOST };
  const chosen = filters();
  const [all, some] = await Promise.all([range, ...(chosen ? [{ ...range, ...chosen }] : [])].map((query) => ask("api/v1/events", query, signal)));
  answer = all;
  filtered = some ?? all;
  show();
}

export function startEvents() {
  table = new Table(byId("events-table"), COLUMNS, (event) => event.id);
  pages = new LocalPages(table, "events", PAGE, show);
  const poll = new Poll(byId("main"), 3000, refresh, { events: [onRange, onScope] }); // of the whole page, because its charts show the marks
  bind(byId("events-severity"), "severity");
  bind(byId("events-filter"), "events");
  onChange(["events", "severity"], () => {
    pages.turnTo(0);
    poll.now();
  });
  byId("events-go").addEventListener("click", () => {
    const [since, until] = timesOfChosen();
    chooseRange(since - 1, until + AROUND_S);
  });
}
