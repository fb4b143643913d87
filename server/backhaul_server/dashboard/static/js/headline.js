// The headline: tiles and alerts, updated by each live event.

import { byId, element, icon, setAttribute, setText, show } from "./dom.js";
import { ago, bytes, count, duration, NONE, percent, runName, threeDigits } from "./format.js";
import { nameWithRank, runOf } from "./scope.js";

const SHOWN_ALERTS = matchMedia("(max-width: 640px)").matches ? 1 : 3;
let areAllShown = false;
let lastAlerts = { list: [], nowS: 0 };

function tile(name, figure, note, level = null) {
  const host = document.querySelector(`[data-tile="${name}"]`);
  const [value, unit] = figure;
  show(host.querySelector(".figure"), value, unit ? element("small", {}, ` ${unit}`) : "");
  setText(host.querySelector(".note"), note);
  setAttribute(host, "data-level", level);
}

/** Returns the note of a value that is not known now: the age of the last one, or `never` if there was none. */
function lastKnown(overview, atS, never) {
  return atS === null ? never : `last known ${ago(atS, overview.at_s)}`;
}

/** Returns how much longer or shorter steps are; a difference that is noise has no sign. See NOISE in collect/verdict.py. */
function againstTorch({ added_ms_per_step: longer, spared_ms_per_step: spared }) {
  if (Math.abs(longer) <= 0.05 * spared) return ["equal"];
  return [threeDigits(Math.abs(longer)), longer > 0 ? "ms longer" : "ms shorter"];
}

function partsOf(overview) {
  const [wait, own, spared] = ["wait", "overhead", "spared"].map((part) => threeDigits(overview[`${part}_ms_per_step`]));
  return `wait ${wait} and overhead ${own} ms for ${spared} ms of recomputing here`;
}

/** Returns how many workers are in each state other than serving, in words, and how bad that is. */
function missingOf(workers) {
  const states = workers.map((worker) => worker.state).filter((one) => one !== "serving");
  const counts = [...new Set(states)].sort().reverse().map((one) => `${count(states.filter((other) => other === one).length)} ${one}`);
  return [counts.join(", "), states.includes("unreachable") ? "bad" : "warn"];
}

/** Returns what the numbers in the tiles cover: a worker that is unreachable is left out of what is true now. */
function scopeOf(workers) {
  const answering = workers.filter((worker) => worker.state !== "unreachable").length;
  if (answering === workers.length) return "Now, over all workers and runs";
  if (answering === 0) return "No worker answers now";
  return `Now, over all runs and ${answering === 1 ? "the only worker that answers" : `the ${count(answering)} workers that answer`}`;
}

/** Shows the numbers of a live event in the tiles. */
export function showOverview({ overview, workers, sessions: open }) {
  setText(byId("tiles-head"), scopeOf(workers));
  const missing = overview.workers - overview.healthy_workers;
  const [states, level] = missingOf(workers);
  tile(
    "workers",
    [count(overview.healthy_workers), `of ${count(overview.workers)}`],
    missing > 0 ? states : "all healthy",
    missing > 0 ? level : null,
  );
  const unheard = lastKnown(overview, overview.heard_at_s, "no worker has answered yet");
  const unstepped = lastKnown(overview, overview.stepped_at_s, "no step has been reported yet");
  const { sessions, steps_per_s: rate, saved_bytes: saved, added_ms_per_step: added, remote_share: share, fallbacks } = overview;
  if (sessions === null) tile("sessions", [NONE], unheard);
  else tile("sessions", [count(sessions)], `${count(open.length)} ${open.length === 1 ? "session" : "sessions"}`);
  if (rate === null) tile("rate", [NONE], unheard);
  else tile("rate", [threeDigits(rate), "/s"], "all runs, last 30 s");
  if (saved === null) tile("saved", [NONE], unstepped);
  else tile("saved", bytes(saved).split(" "), `${bytes(overview.peak_saved_bytes)} at the peak`);
  if (added === null) tile("added", [NONE], unstepped);
  else tile("added", againstTorch(overview), partsOf(overview));
  if (share === null) tile("remote", [NONE], unstepped);
  else tile("remote", percent(share).split(" "), "last 5 min");
  if (fallbacks === null) tile("fallbacks", [NONE], unheard);
  else tile("fallbacks", [count(fallbacks)], "last 5 min", fallbacks > 0 ? "bad" : null);
  const dropped = overview.dropped_reports;
  setText(
    byId("history"),
    [
      overview.history ? `No history: ${overview.history}.` : "Runs are kept in the history.",
      dropped ? `Trainers dropped ${count(dropped)} reports because their queues were full.` : "",
    ].join(" "),
  );
}

export function showAlerts(list, nowS) {
  const host = byId("alerts");
  const ordered = [...list].sort((a, b) => a.severity.localeCompare(b.severity) || a.since_s - b.since_s);
  const rest = ordered.length - SHOWN_ALERTS;
  const button = element("button", { type: "button", class: "rest", "aria-expanded": areAllShown }, areAllShown ? "Show fewer" : `Show ${rest} more`);
  button.addEventListener("click", () => {
    areAllShown = !areAllShown;
    showAlerts(lastAlerts.list, lastAlerts.nowS);
  });
  lastAlerts = { list, nowS };
  const shown = areAllShown ? ordered : ordered.slice(0, SHOWN_ALERTS);
  show(host, shown.map((alert) => alertElement(alert, nowS)), rest > 0 ? button : "");
  host.hidden = list.length === 0;
}

function alertElement(alert, nowS) {
  return element(
    "div",
    { class: "alert", "data-severity": alert.severity },
    icon(alert.severity),
    element(
      "p",
      {},
      element("span", { class: "hidden" }, `${alert.severity}: `),
      element("span", { class: "alert-name", title: alert.name }, inWords(alert.name)),
      element("span", { class: "alert-subject" }, subjectOf(alert)),
      element("span", { class: "alert-summary" }, `${alert.summary}.`),
    ),
    element("time", {}, `for ${duration(nowS - alert.since_s)}`),
  );
}

/** Returns the name of an alert in words: "LinkSlow", as Prometheus has it, becomes "Link slow". */
function inWords(name) {
  return name.replace(/(?<=[a-z])[A-Z]/g, (letter) => ` ${letter.toLowerCase()}`);
}

/** Returns the subject, by its name for a run; "" if the summary names it already. */
function subjectOf(alert) {
  if (alert.summary.includes(alert.subject)) return "";
  if (runOf(alert.subject)) return nameWithRank(alert.subject);
  return /^[0-9a-f]{16,}$/.test(alert.subject) ? runName(alert.subject) : alert.subject;
}
