// The memory and the load of all workers at once, over the chosen time range.

import { byId } from "./dom.js";
import { goToWorker } from "./fleet.js";
import { GridMap } from "./grid.js";
import { ask, Poll } from "./poll.js";
import { fixedRange, onRange, rangeQuery } from "./range.js";

const POINTS = 60;
const MAPS = { "fleet-memory": "memory_share", "fleet-load": "load" };

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
  const refresh = async (signal) => {
    const fleet = await ask("api/v1/fleet", { ...rangeQuery(), points: POINTS }, signal);
    for (const [field, map] of maps) map.update(fleet, sentenceOf(fleet, field));
  };
  new Poll(byId("fleet-maps"), 2000, refresh, { events: [onRange] });
}
