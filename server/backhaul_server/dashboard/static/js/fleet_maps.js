// The memory and the load of all workers at once, over the chosen time range.

import { firstShown } from "./cell_map.js";
import { byId } from "./dom.js";
import { goToWorker } from "./fleet.js";
import { GridMap } from "./grid.js";
import { ask, Poll } from "./poll.js";
import { fixedRange, onRange, rangeQuery } from "./range.js";

const POINTS = 60;
const FEWEST_COLUMNS = 15;
const MAPS = { "fleet-memory": "memory_share", "fleet-load": "load" };

const FIELDS = Object.values(MAPS);

/** Returns the intervals of a fleet from one to another one, which does not belong to them. */
function cut(fleet, begin, end) {
  const ofWorker = (worker) => Object.fromEntries(FIELDS.map((field) => [field, worker[field].slice(begin, end)]));
  return { at_s: fleet.at_s.slice(begin, end), workers: fleet.workers.map((worker) => ({ ...worker, ...ofWorker(worker) })) };
}

/**
 * Leaves out the time before the first answer of any worker, so that the map of a new dashboard is not mostly empty, and the
 * last interval while it is so young that some worker which answers has no value in it yet.
 */
function settled(fleet) {
  const isYoung = fleet.workers.some((worker) => worker.state === "serving" && FIELDS.some((field) => worker[field].at(-1) === null));
  const end = isYoung && fleet.at_s.length > 1 ? fleet.at_s.length - 1 : fleet.at_s.length;
  const isKnown = (column) => fleet.workers.some((worker) => FIELDS.some((field) => worker[field][column] !== null));
  return cut(fleet, firstShown(end, isKnown, FEWEST_COLUMNS), end);
}

function sentenceOf(fleet, field) {
  if (fleet.workers.length === 0) return "No worker is being watched. Start the dashboard with --worker ADDRESS.";
  const isKnown = (one) => fleet.workers.some((worker) => worker[one].some((share) => share !== null));
  if (isKnown(field)) return "";
  if (FIELDS.some(isKnown)) return "The workers that answered in this time range did not report it.";
  const hasAnswered = fixedRange() || fleet.workers.some((worker) => worker.seen_at_s > 0);
  return hasAnswered ? "No worker has answered in this time range. Choose another one at the top." : "No worker has answered yet. Check that its process runs and that this machine can reach its address.";
}

export function startFleetMaps() {
  const maps = Object.entries(MAPS).map(([id, field]) => [field, new GridMap(byId(id), field, goToWorker)]);
  const refresh = async (signal) => {
    const answer = await ask("api/v1/fleet", { ...rangeQuery(), points: POINTS }, signal);
    const fleet = fixedRange() ? answer : settled(answer);
    for (const [field, map] of maps) map.update(fleet, sentenceOf(fleet, field));
  };
  new Poll(byId("fleet-maps"), 2000, refresh, { events: [onRange] });
}
