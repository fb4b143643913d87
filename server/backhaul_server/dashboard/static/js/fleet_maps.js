// The memory and the load of all workers at once, over the chosen time range.

import { addCopyButton } from "./copy.js";
import { byId } from "./dom.js";
import { goToWorker } from "./fleet.js";
import { GridMap } from "./grid.js";
import { ask, Poll } from "./poll.js";
import { fixedRange, onRange, rangeQuery } from "./range.js";

const POINTS = 60;
const FEWEST_COLUMNS = 15;
const MAPS = { "fleet-memory": "memory_share", "fleet-load": "load" };

/** Cuts off the time before the first answer of any worker, so that the map of a new dashboard is not mostly empty. */
function recent(fleet) {
  const isKnown = (column) => fleet.workers.some((worker) => Object.values(MAPS).some((field) => worker[field][column] !== null));
  const first = fleet.at_s.findIndex((_, column) => isKnown(column));
  const begin = Math.max(0, Math.min(first, fleet.at_s.length - FEWEST_COLUMNS));
  const cut = (worker) => Object.fromEntries(Object.values(MAPS).map((field) => [field, worker[field].slice(begin)]));
  return { at_s: fleet.at_s.slice(begin), workers: fleet.workers.map((worker) => ({ ...worker, ...cut(worker) })) };
}

/** Leaves out the last interval while it is so young that some worker which answers has no value in it yet. */
function settled(fleet) {
  const fields = Object.values(MAPS);
  const isYoung = fleet.workers.some((worker) => worker.state === "serving" && fields.some((field) => worker[field].at(-1) === null));
  if (!isYoung || fleet.at_s.length < 2) return fleet;
  const cut = (worker) => Object.fromEntries(fields.map((field) => [field, worker[field].slice(0, -1)]));
  return { at_s: fleet.at_s.slice(0, -1), workers: fleet.workers.map((worker) => ({ ...worker, ...cut(worker) })) };
}

function sentenceOf(fleet, field) {
  if (fleet.workers.length === 0) return "No worker is being watched. Start the dashboard with --worker ADDRESS.";
  const isKnown = (one) => fleet.workers.some((worker) => worker[one].some((share) => share !== null));
  if (isKnown(field)) return "";
  if (Object.values(MAPS).some(isKnown)) return "The workers that answered in this time range did not report it.";
  const hasAnswered = fixedRange() || fleet.workers.some((worker) => worker.seen_at_s > 0);
  return hasAnswered ? "No worker has answered in this time range. Choose another one at the top." : "No worker has answered yet. Check that its process runs and that this machine can reach its address.";
}

export function startFleetMaps() {
  const maps = Object.entries(MAPS).map(([id, field]) => [field, new GridMap(byId(id), field, goToWorker)]);
  const poll = new Poll(byId("fleet-maps"), 2000, async (signal) => {
    const answer = await ask("api/v1/fleet", { ...rangeQuery(), points: POINTS }, signal);
    const fleet = fixedRange() ? answer : recent(settled(answer));
    for (const [field, map] of maps) map.update(fleet, sentenceOf(fleet, field));
  });
  onRange(() => poll.now());
  for (const id of Object.keys(MAPS)) addCopyButton(byId(id));
}
