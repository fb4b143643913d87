// The controls of the timeline, its table of steps, and the clocks of its workers.

import { bind, onChange, state } from "./address.js";
import { hideCall, showCall } from "./call.js";
import { byId, element, setIcon, setText, speak } from "./dom.js";
import { bytes, count, milliseconds, NONE, offset, percent } from "./format.js";
import { describe, TimelineChart } from "./timeline_chart.js";
import { ask, pathTo, Poll } from "./poll.js";
import { fixedRange, onRange } from "./range.js";
import { chosenRuns, nameOf, nameWithRank, onScope, runOf } from "./scope.js";
import { Table } from "./table.js";

const ZOOM = 1.6;
const OLDEST_MS = 10_000;
const MOST_KEYS = 8; // workers whose clocks are listed without a click

const STEPS = [
  { title: "Rank", isText: true, className: "rank", cell: (step) => String(runOf(step.run)?.rank ?? 0) },
  { title: "Step", isText: true, cell: (step) => String(step.number) },
  { title: "Took", cell: (step) => milliseconds(step.duration_ms) },
  { title: "Overlap", cell: (step) => percent(step.overlap), hint: "Share of the time of remote work during which backward was not blocked" },
  { title: "Exposed wait", cell: (step) => milliseconds(step.wait_ms), hint: "Time for which backward was blocked by a worker" },
];
const SHARES = [
  { title: "Computed by", isText: true, cell: (share) => share.worker || "trainer" },
  { title: "Share", cell: (share) => percent(share.share), hint: "Of the segments of all micro-batches" },
  { title: "Each", cell: (share) => (share.segments ? milliseconds(share.segment_ms) : NONE), hint: "Mean time of a segment: of recomputation and backward on the trainer, from the request to the answer on a worker" },
  { title: "Speed", cell: (share) => (share.speed === null ? NONE : share.speed.toFixed(2)), hint: "Relative to the trainer" },
];

const chart = new TimelineChart(byId("timeline-chart"), titleOf, () => pause(true));
const keys = element("div", { class: "hint", id: "timeline-workers" });
let poll = null;
let isPaused = false;
let steps = null;
let shares = null;
let newest = ""; // the last step of each run
let shown = { newest: null, atMs: 0 };

function pause(paused) {
  isPaused = paused;
  const button = byId("timeline-pause");
  button.setAttribute("aria-pressed", paused);
  setIcon(button.firstElementChild, paused ? "play" : "pause");
  setText(button.lastElementChild, paused ? "Resume" : "Pause");
  if (!paused) poll.now();
}

/** Shows the call of a bar in the panel, and pauses the timeline. */
function pick(bar) {
  chart.pick(bar);
  if (bar === null) {
    hideCall();
    return;
  }
  pause(true);
  showCall(chart.timeline, bar, () => {
    pick(null);
    chart.plot.focus();
  });
}

/** Returns the line above the rows of one of several runs: its rank, and how well its clock is aligned. */
function titleOf(run) {
  const rank = runOf(run.run)?.world_size > 1 ? `rank ${run.rank}` : nameOf(run.run);
  const clock = run.error_ms === null ? "clock not aligned" : `times good to ± ${milliseconds(run.error_ms)}`;
  return `${rank} · ${run.trainer} · ${clock}`;
}

function showSteps(timeline) {
  byId("steps").classList.toggle("has-ranks", timeline.runs.length > 1);
  steps.update(timeline.steps);
  showKeys(timeline);
  const texts = timeline.steps.map((step) => STEPS.slice(1).map((column) => `${column.title.toLowerCase()} ${column.cell(step)}`).join(", "));
  chart.describe(`Timeline. ${texts.join("; ")}. Arrow keys move between bars, Enter shows the segment of a bar, plus and minus zoom.`, timeline.why_empty);
}

/** Names the workers of the timeline, with the offset of their clocks and the bound of its error. */
function showKeys(timeline) {
  const clockOf = (worker) => timeline.workers.find((one) => one.worker === worker);
  const entries = chart.workers.map((worker, i) => {
    const clock = clockOf(worker);
    const isKnown = clock !== undefined && clock.clock_offset_ms !== null;
    const text = isKnown ? `clock ${offset(clock.clock_offset_ms, clock.clock_error_ms)}` : "clock offset unknown";
    return element("li", {}, ...(chart.namesWorkers ? [element("b", {}, `w${i + 1} `)] : []), `${worker}, ${text}`);
  });
  const errors = timeline.workers.map((one) => one.clock_error_ms).filter((error) => error !== null);
  const bound = errors.length > 0 ? `, which is known to ± ${milliseconds(Math.max(...errors))} or better` : "";
  const texts = [
    ...(entries.length === 0 ? [] : [`Bars of workers are moved by the offset of the worker’s clock${bound}.`]),
    ...(timeline.note ? [timeline.note] : []),
    ...(timeline.left_out ? [`The ${count(timeline.left_out)} shortest bars are not shown: select fewer steps.`] : []),
  ];
  const signature = JSON.stringify([entries.map((entry) => entry.textContent), texts]);
  if (keys.dataset.shown === signature) return;
  keys.dataset.shown = signature;
  const list = element("ul", { class: "keys" }, ...entries);
  const isLong = entries.length > MOST_KEYS;
  const folded = element("details", {}, element("summary", {}, `Clocks of the ${count(entries.length)} workers`), list);
  keys.replaceChildren(...texts.map((text) => element("p", {}, text)), isLong ? folded : list);
}

/** Shows who has computed the last accumulation block, if the steps have one. */
function showBlock(timeline) {
  const block = timeline.steps.findLast((step) => step.block !== null)?.block;
  byId("block").hidden = !block;
  byId("timeline-rows").closest("label").hidden = !timeline.calls.some((call) => call.micro_batch > 0);
  if (!block) return;
  const speedUp = block.speed_up === null ? "" : `, speed-up ${block.speed_up.toFixed(2)}`;
  setText(byId("block-about"), `${count(block.micro_batches)} micro-batches in ${milliseconds(block.took_ms)}${speedUp}. At most ${bytes(block.pending_gradient_bytes)} of gradients were pending.`);
  shares.update(block.shares);
}

function show(timeline) {
  chart.show(timeline);
  showBlock(timeline);
  hideCall();
  byId("steps").closest(".side").hidden = timeline.steps.length === 0;
  chart.caption = timeline.runs.length > 1 ? `Steps of ${count(timeline.runs.length)} ranks of ${nameOf(timeline.run)}` : timeline.run ? `Steps of run ${nameWithRank(timeline.run)}` : "Steps of trainer and workers";
  showSteps(timeline);
  byId("timeline-export").hidden = timeline.spans.length === 0;
  byId("timeline-export").href = pathTo("api/v1/timeline/trace", { run: timeline.run, steps: state("steps") });
}

function showRefusal(sentence) {
  chart.describe("", `This run has no timeline: ${sentence}.`);
  byId("timeline-export").hidden = true;
  keys.replaceChildren();
  delete keys.dataset.shown;
  byId("steps").closest(".side").hidden = true;
}

async function refresh(signal) {
  if (isPaused) return;
  // Thousands of bars are not fetched again if no step is new, except that calls may be reported after their step.
  const isKnown = shown.newest === newest && performance.now() - shown.atMs < OLDEST_MS;
  if (isKnown) return;
  const asked = { newest, atMs: performance.now() };
  const [since, until] = fixedRange() ?? [];
  const timeline = await ask("api/v1/timeline", { runs: chosenRuns(), steps: state("steps"), since_s: since, until_s: until }, signal);
  if (isPaused || chart.hovered !== null) return;
  show(timeline);
  shown = asked;
}

/** Takes the runs of a live event, by which the timeline knows whether there are new steps. */
export function noteSteps(runs) {
  newest = runs.map((run) => `${run.run} ${run.last_step}`).join();
}

function zoom(factor) {
  if (chart.timeline !== null) chart.zoom(factor);
}

function fit() {
  if (chart.timeline !== null) chart.fit();
}

function onKey(event) {
  const actions = {
    "+": () => zoom(ZOOM),
    "=": () => zoom(ZOOM),
    "-": () => zoom(1 / ZOOM),
    0: fit,
    Escape: () => pick(null),
    Enter: () => pick(chart.picked ?? chart.neighbour("ArrowRight")),
  };
  if (event.key.startsWith("Arrow")) {
    const bar = chart.neighbour(event.key);
    if (bar === null) return;
    event.preventDefault();
    pause(true);
    chart.pick(bar);
    speak(describe(bar));
    if (!byId("call").hidden) pick(bar);
  } else if (actions[event.key] && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    actions[event.key]();
  }
}

export function startTimeline() {
  byId("timeline-chart").append(keys);
  steps = new Table(byId("steps"), STEPS, (step) => `${step.run} ${step.number}`);
  shares = new Table(byId("shares"), SHARES, (share) => share.worker);
  const group = () => {
    chart.groupByMicroBatch(state("rows") === "micro-batches");
    if (chart.timeline) showSteps(chart.timeline);
  };
  const begin = () => {
    shown.newest = null;
    pause(false);
  };
  poll = new Poll(byId("timeline"), 2000, refresh, { onRefused: showRefusal });
  bind(byId("timeline-rows"), "rows");
  bind(byId("timeline-steps"), "steps");
  onChange(["rows"], group);
  onChange(["steps"], begin);
  onScope(begin);
  onRange(begin);
  group();
  byId("timeline-pause").addEventListener("click", () => pause(!isPaused));
  byId("timeline-in").addEventListener("click", () => zoom(ZOOM));
  byId("timeline-out").addEventListener("click", () => zoom(1 / ZOOM));
  byId("timeline-fit").addEventListener("click", fit);
  chart.plot.addEventListener("keydown", onKey);
  chart.plot.addEventListener("click", () => pick(chart.atPointer));
  byId("timeline-chart").dataset.scope = "by the dashboard’s clock";
}
