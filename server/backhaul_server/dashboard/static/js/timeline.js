// The controls of the timeline, its table of steps, and the panel of the selected segment.

import { drawInTheme, LANE_COLOURS } from "./colour.js";
import { byId, element, explain, icon, setIcon, setOptions, setText, speak } from "./dom.js";
import { bytes, count, drift, milliseconds, NONE, percent, runName } from "./format.js";
import { describe, Lanes } from "./lanes.js";
import { ask, pathTo, Poll } from "./poll.js";
import { Table } from "./table.js";
import { hideTip, showTip } from "./tip.js";

const ZOOM = 1.6;
const DRAG_PIXELS = 4;
const OLDEST_MS = 10_000;

const canvas = element("canvas", { tabindex: "0", role: "application", "aria-roledescription": "timeline", "aria-label": "Timeline" });
const note = element("p", { class: "empty", hidden: "" });
const keys = element("p", { class: "hint", id: "timeline-workers" });
const lanes = new Lanes(canvas);
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
  lanes.picked = bar;
  lanes.draw();
  if (bar === null) {
    byId("call").hidden = true;
    return;
  }
  if (!isPaused) pause(true);
  const call = lanes.timeline.calls[bar.call];
  const entries = [
    ["Step", String(call.step)],
    ["Worker", call.worker || "none"],
    ...(call.micro_batch ? [["Micro-batch", String(call.micro_batch)]] : []),
    ["Decision", call.decision || "not recomputed"],
    ["Sent", bytes(call.up_bytes)],
    ["Received", bytes(call.down_bytes)],
    ["Own overhead", milliseconds(call.overhead_ms)],
    ["Retries", count(call.retries)],
    ["Mismatches", count(call.mismatches)],
    ["Drift", drift(call.drift)],
  ];
  for (const lane of Object.keys(LANE_COLOURS)) {
    const spans = lanes.timeline.spans.filter((span) => span.call === bar.call && span.lane === lane);
    if (spans.length > 0) entries.push([lane[0].toUpperCase() + lane.slice(1), milliseconds(spans.reduce((sum, span) => sum + span.duration_ms, 0))]);
  }
  const list = element("dl", {}, ...entries.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
  if (call.reason) list.append(element("dt", {}, "Why"), element("dd", { class: "long" }, call.reason));
  const close = element("button", { type: "button", class: "icon-only quiet", "aria-label": "Close" }, icon("close"));
  close.addEventListener("click", () => {
    pick(null);
    canvas.focus();
  });
  const title = element("h3", {}, call.segment, call.is_fallback ? element("span", { class: "error" }, " fallback") : "");
  byId("call").replaceChildren(element("div", { class: "call-head" }, title, close), list);
  byId("call").hidden = false;
}

function showSteps(timeline) {
  steps.update(timeline.steps);
  const workers = lanes.namesWorkers ? lanes.workers.map((worker, i) => `w${i + 1} ${worker}`).join(" · ") : (lanes.workers[0] ?? "");
  setText(keys, workers + (timeline.left_out ? ` · the ${count(timeline.left_out)} shortest bars are not shown: select fewer steps` : ""));
  const texts = timeline.steps.map((step) => `step ${step.number} took ${milliseconds(step.duration_ms)}, overlap ${percent(step.overlap)}, exposed wait ${milliseconds(step.wait_ms)}`);
  canvas.setAttribute("aria-label", `Timeline. ${texts.join("; ")}. Arrow keys move between bars, Enter shows the segment of a bar, plus and minus zoom.`);
}

/** Shows who has computed the last accumulation block, if the steps have one. */
function showBlock(timeline) {
  const block = timeline.steps.findLast((step) => step.block !== null)?.block;
  byId("block").hidden = !block;
  byId("timeline-rows").closest("label").hidden = !timeline.calls.some((call) => call.micro_batch > 0);
  if (!block) return;
  const speedUp = block.speed_up === null ? "" : `, speed-up ${block.speed_up.toFixed(2)}`;
  setText(byId("block-about"), `${count(block.micro_batches)} micro-batches in ${milliseconds(block.took_ms)}${speedUp}. At most ${bytes(block.held_bytes)} of gradients were held back.`);
  shares.update(block.shares);
}

function show(timeline) {
  lanes.show(timeline);
  showBlock(timeline);
  byId("call").hidden = true;
  const isEmpty = timeline.steps.length === 0;
  explain(note, isEmpty ? "No step has been reported yet. A trainer that has called backhaul.connect() reports each step after its optimizer has stepped." : "");
  canvas.hidden = isEmpty;
  byId("steps").closest(".side").hidden = isEmpty;
  showSteps(timeline);
  byId("timeline-export").href = pathTo("/api/v1/timeline/trace", { run: timeline.run, steps: byId("timeline-steps").value });
}

async function refresh(signal) {
  if (isPaused) return;
  // Thousands of bars are not fetched again if no step is new, except that calls may be reported after their step.
  const isKnown = shown.newest === newest && performance.now() - shown.atMs < OLDEST_MS;
  if (isKnown) return;
  const asked = { newest, atMs: performance.now() };
  const timeline = await ask("/api/v1/timeline", { run: byId("timeline-run").value, steps: byId("timeline-steps").value }, signal);
  if (isPaused || lanes.pointed !== null) return;
  show(timeline);
  shown = asked;
}

/** Offers the runs of a live event for selection. */
export function offerRuns(runs) {
  newest = runs.map((run) => `${run.run} ${run.last_step}`).join();
  setOptions(byId("timeline-run"), [["", "newest"], ...runs.map((run) => [run.run, `${runName(run.run)} (${run.trainer})`])]);
}

function zoom(factor, x = null) {
  if (lanes.timeline === null) return;
  if (!isPaused) pause(true);
  lanes.zoom(factor, x);
}

function onKey(event) {
  const actions = {
    "+": () => zoom(ZOOM),
    "=": () => zoom(ZOOM),
    "-": () => zoom(1 / ZOOM),
    0: () => fit(),
    Escape: () => pick(null),
    Enter: () => pick(lanes.picked ?? lanes.neighbour("ArrowRight")),
  };
  if (event.key.startsWith("Arrow")) {
    const bar = lanes.neighbour(event.key);
    if (bar === null) return;
    event.preventDefault();
    if (!isPaused) pause(true);
    lanes.picked = bar;
    lanes.reveal(bar);
    lanes.draw();
    speak(describe(bar));
    if (!byId("call").hidden) pick(bar);
  } else if (actions[event.key] && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    actions[event.key]();
  }
}

function fit() {
  if (lanes.timeline === null) return;
  lanes.fit();
  lanes.draw();
}

/** Handles the pointer: hovering shows a bar, a click selects it, dragging moves, and the wheel with Ctrl zooms. */
function listenToPointer() {
  let from = null;
  let hasMoved = false;
  canvas.addEventListener("pointerdown", (event) => {
    from = event.offsetX;
    hasMoved = false;
  });
  canvas.addEventListener("pointermove", (event) => {
    if (from !== null && event.buttons === 1) {
      if (!hasMoved && Math.abs(event.offsetX - from) < DRAG_PIXELS) return;
      if (!hasMoved) canvas.setPointerCapture(event.pointerId);
      hasMoved = true;
      if (!isPaused) pause(true);
      lanes.pan(from - event.offsetX);
      from = event.offsetX;
      return;
    }
    const bar = lanes.at(event.offsetX, event.offsetY);
    if (bar === null) hideTip();
    else showTip(event, describe(bar));
    if (bar !== lanes.pointed) {
      lanes.pointed = bar;
      lanes.draw();
    }
  });
  canvas.addEventListener("pointerleave", () => {
    from = null;
    lanes.pointed = null;
    hideTip();
    lanes.draw();
  });
  canvas.addEventListener("click", (event) => {
    from = null;
    if (!hasMoved) pick(lanes.at(event.offsetX, event.offsetY));
  });
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return; // the page scrolls
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) lanes.pan(event.deltaX);
      else zoom(event.deltaY < 0 ? 1.2 : 1 / 1.2, event.offsetX);
    },
    { passive: false },
  );
}

export function startTimeline() {
  const plot = element("div", { class: "plot" }, canvas, note);
  byId("timeline-chart").append(plot, keys);
  steps = new Table(
    byId("steps"),
    [
      { title: "Step", isText: true, cell: (step) => String(step.number) },
      { title: "Took", cell: (step) => milliseconds(step.duration_ms) },
      { title: "Overlap", cell: (step) => percent(step.overlap), hint: "Share of the time of remote work during which backward was not blocked" },
      { title: "Exposed wait", cell: (step) => milliseconds(step.wait_ms), hint: "Time for which backward was blocked by a worker" },
    ],
    (step) => String(step.number),
  );
  shares = new Table(
    byId("shares"),
    [
      { title: "Computed by", isText: true, cell: (share) => share.worker || "trainer" },
      { title: "Share", cell: (share) => percent(share.share), hint: "Of the segments of all micro-batches" },
      { title: "Each", cell: (share) => (share.segments ? milliseconds(share.segment_ms) : NONE), hint: "Mean time of a segment: of recomputation and backward on the trainer, from the request to the answer on a worker" },
      { title: "Speed", cell: (share) => (share.speed === null ? NONE : share.speed.toFixed(2)), hint: "Relative to the trainer" },
    ],
    (share) => share.worker,
  );
  byId("timeline-rows").addEventListener("change", (event) => {
    lanes.groupByMicroBatch(event.target.value === "micro-batches");
    showSteps(lanes.timeline);
  });
  poll = new Poll(byId("timeline"), 2000, refresh);
  for (const id of ["timeline-run", "timeline-steps"]) {
    byId(id).addEventListener("change", () => {
      shown.newest = null;
      pause(false);
    });
  }
  byId("timeline-pause").addEventListener("click", () => pause(!isPaused));
  byId("timeline-in").addEventListener("click", () => zoom(ZOOM));
  byId("timeline-out").addEventListener("click", () => zoom(1 / ZOOM));
  byId("timeline-fit").addEventListener("click", fit);
  canvas.addEventListener("keydown", onKey);
  listenToPointer();
  new ResizeObserver(() => lanes.draw()).observe(canvas);
  drawInTheme(() => lanes.draw());
}
