// The run and the rank that the page shows. Ranks of one distributed job are runs of their own; they are chosen together.

import { bind, change, offer, onChange, state } from "./address.js";
import { byId } from "./dom.js";
import { count, runName } from "./format.js";
import { ask, RefusedError } from "./poll.js";

const SAME_START_S = 120; // ranks of a job connect within this time
const runs = new Map(); // every run that the page has heard of, by id
const sameNames = new Map(); // how many of these runs have a name and a rank in common
const unknown = new Set(); // ids of the address that the dashboard knows nothing of
const listeners = [];
let newest = "";

/** Returns how a run is called: its name, or the first letters of its id. */
export function nameOf(run) {
  const known = runs.get(run);
  return known?.name || runName(run);
}

function ownName(run) {
  const known = runs.get(run);
  return known?.world_size > 1 ? `${nameOf(run)} rank ${known.rank}` : nameOf(run);
}

/** Returns the name of a run, with its rank where there are several, and with its id where another run has the same name. */
export function nameWithRank(run) {
  const name = ownName(run);
  return sameNames.get(name) > 1 ? `${name} (${runName(run)})` : name;
}

/** Returns what the API last said of a run; undefined if it is unknown. */
export function runOf(id) {
  return runs.get(id);
}

/** Returns how the choice of a run is called: the job if all of its ranks are chosen, or the run. */
export function chosenName() {
  const chosen = chosenRuns();
  return chosen.length > 1 ? nameOf(state("run")) : nameWithRank(chosen[0] ?? state("run"));
}

/** Whether the dashboard has said that it knows no run of this id. */
export function isUnknown(run) {
  return unknown.has(run) && !runs.has(run);
}

/** Returns the run that is chosen, by itself or by its rank; "" if all are. */
export function chosenRun() {
  const isAll = state("run") === "" && state("rank") === "";
  return isAll ? "" : (chosenRuns()[0] ?? state("run"));
}

/** Returns the one run that is shown where only one can be: the chosen one, or the newest. */
export function shownRun() {
  const base = state("run") || newest;
  return base === "" ? "" : (ofRank(peersOf(base))[0] ?? base);
}

/** Returns the chosen run, or the newest, and the other ranks of its job, as far as the rank is not chosen too. */
export function chosenRuns() {
  const base = state("run") || newest;
  return base === "" ? [] : ofRank(peersOf(base));
}

/** Whether a run has the chosen rank. */
export function hasChosenRank(run) {
  return state("rank") === "" || runs.get(run) === undefined || String(runs.get(run).rank) === state("rank");
}

/** Returns a function that says whether a run is among the chosen ones. A run that is not known yet counts as chosen. */
export function inScope() {
  const chosen = new Set(state("run") === "" ? [] : chosenRuns());
  return (run) => (chosen.size === 0 || chosen.has(run)) && hasChosenRank(run);
}

function ofRank(peers) {
  return state("rank") === "" ? peers : peers.filter((id) => hasChosenRank(id));
}

/** Returns the ids of the runs of one job, in the order of their ranks. A run without other ranks is a job by itself. */
export function peersOf(id) {
  const run = runs.get(id);
  if (!(run?.world_size > 1)) return [id];
  const isPeer = (one) => one.world_size === run.world_size && one.name === run.name && Math.abs(one.started_at_s - run.started_at_s) < SAME_START_S;
  const byRank = new Map();
  for (const one of [...runs.values()].filter(isPeer)) {
    const other = byRank.get(one.rank);
    const isNearer = other === undefined || Math.abs(one.started_at_s - run.started_at_s) < Math.abs(other.started_at_s - run.started_at_s);
    if (one.run === id || (isNearer && other?.run !== id)) byRank.set(one.rank, one);
  }
  return [...byRank.values()].sort((a, b) => a.rank - b.rank).map((one) => one.run);
}

/** Takes runs that the API has listed, and offers them for selection. */
export function learnRuns(list) {
  const chosenBefore = chosenRuns().join();
  for (const run of list) runs.set(run.run, run);
  countNames();
  newest = [...runs.values()].reduce((best, run) => (best === undefined || run.started_at_s > best.started_at_s ? run : best), undefined)?.run ?? "";
  offerRuns();
  const isChosen = state("run") !== "" || state("rank") !== "";
  if (isChosen && chosenRuns().join() !== chosenBefore) for (const callback of listeners) callback();
}

function countNames() {
  sameNames.clear();
  for (const run of runs.keys()) sameNames.set(ownName(run), (sameNames.get(ownName(run)) ?? 0) + 1);
}

function offerRuns() {
  document.title = state("run") === "" ? "Backhaul" : `${chosenName()} · Backhaul`;
  const known = [...runs.values()].sort((a, b) => b.started_at_s - a.started_at_s);
  const jobs = known.filter((run) => peersOf(run.run)[0] === run.run || run.run === state("run"));
  const options = jobs.map((run) => [run.run, labelOf(run)]);
  if (state("run") && !runs.has(state("run"))) options.push([state("run"), runName(state("run"))]);
  offer(byId("run"), "run", "all runs", options);
  const ranks = [...new Set(known.filter((run) => run.world_size > 1).map((run) => run.rank))].sort((a, b) => a - b);
  if (state("rank") && !ranks.includes(Number(state("rank")))) ranks.push(Number(state("rank")));
  offer(byId("rank"), "rank", "all ranks", ranks.map((rank) => [String(rank), `rank ${rank}`]));
  byId("rank").closest("label").hidden = ranks.length === 0;
}

function labelOf(run) {
  const ranks = run.world_size > 1 ? `, ${count(run.world_size)} ranks` : "";
  return run.name ? `${run.name} (${runName(run.run)}${ranks})` : `${runName(run.run)} (${run.trainer}${ranks})`;
}

/** Calls back after another run or rank has been chosen, or after more ranks of the chosen job have become known. */
export function onScope(callback) {
  listeners.push(callback);
  onChange(["run", "rank"], callback);
}

/** Chooses a run, in place of the rank if it has another. */
export function chooseRun(run) {
  change({ run, rank: hasChosenRank(run) ? state("rank") : "" });
}

/** Asks for a run of the address that no answer has had yet, such as one of last week. */
async function learnChosen() {
  const run = state("run");
  if (run === "" || runs.has(run)) return;
  try {
    learnRuns([await ask(`api/v1/runs/${encodeURIComponent(run)}`)]);
  } catch (error) {
    console.debug(error); // an unknown run stays chosen, and the page says that it knows nothing of it
    if (error instanceof RefusedError && error.status === 404) unknown.add(run);
  }
}

export function startScope() {
  bind(byId("run"), "run");
  bind(byId("rank"), "rank");
  onScope(() => {
    offerRuns();
    learnChosen();
  });
  offerRuns();
  learnChosen();
}
