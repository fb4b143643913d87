// Starts the parts of the page and passes live events to them. The page never changes anything on the dashboard.

import { byId, setAttribute, setText } from "./dom.js";
import { startEvents } from "./events.js";
import { count, duration } from "./format.js";
import { showFleet, startFleet } from "./fleet.js";
import { startFleetMaps } from "./fleet_maps.js";
import { showAlerts, showOverview } from "./headline.js";
import { offerWorkers, startLatency } from "./latency.js";
import { follow } from "./live.js";
import { startMemory } from "./memory.js";
import { startPrinting } from "./print.js";
import { startRange } from "./range.js";
import { startRuns } from "./runs.js";
import { learnRuns, startScope } from "./scope.js";
import { startSegments } from "./segments.js";
import { noteSteps, startTimeline } from "./timeline.js";
import { startTopology } from "./topology.js";
import { showVerdict, startVerdict } from "./verdict.js";

let hasNumbers = false;

function showLive(live) {
  hasNumbers = true;
  learnRuns(live.runs);
  showOverview(live);
  showAlerts(live.alerts, live.overview.at_s);
  showVerdict(live);
  showFleet(live);
  offerWorkers(live.workers);
  noteSteps(live.runs);
  setText(byId("status").lastElementChild, `live, ${count(live.overview.healthy_workers)} of ${count(live.overview.workers)} workers`);
}

function showAge(ageS) {
  setAttribute(byId("status"), "data-state", ageS === null ? "live" : "stale");
  document.body.classList.toggle("is-stale", ageS !== null);
  if (ageS === null) return;
  const age = duration(ageS);
  setText(byId("status").lastElementChild, hasNumbers ? `no answer, the numbers are ${age} old` : `no answer for ${age}`);
}

/** Marks the visible section in the navigation. */
function followSections() {
  const links = [...document.querySelectorAll(".sections a")];
  const sections = links.map((link) => document.querySelector(link.hash));
  const mark = () => {
    const current = scrollY < 8 ? 0 : Math.max(0, sections.findLastIndex((section) => section.getBoundingClientRect().top < innerHeight * 0.35));
    links.forEach((link, i) => setAttribute(link, "aria-current", i === current ? "true" : null));
  };
  addEventListener("scroll", mark, { passive: true });
  mark();
}

/** Keeps the section of the address in view while the sections above it get their numbers, until the viewer scrolls. */
function arrive() {
  const section = document.getElementById(location.hash.slice(1));
  if (section === null) return;
  const filling = new ResizeObserver(() => section.scrollIntoView({ behavior: "instant" }));
  filling.observe(byId("main"));
  for (const input of ["wheel", "pointerdown", "touchstart", "keydown"]) addEventListener(input, () => filling.disconnect(), { once: true, passive: true });
}

startScope();
startRange();
startVerdict();
startMemory();
startLatency();
startTimeline();
startSegments();
startEvents();
startTopology();
startFleet();
startFleetMaps();
startRuns();
startPrinting();
followSections();
arrive();
addEventListener("hashchange", arrive);
follow(showLive, showAge);
