// Memory over time: the tiers of a worker or the bytes held for a run, and beside it the memory of the trainer.

import { bind, change, onChange, state } from "./address.js";
import { Chart, swatchOf } from "./chart.js";
import { colour } from "./colour.js";
import { byId, element, setOptions } from "./dom.js";
import { ageOf, timeOfNumbers, workerAt } from "./fleet.js";
import { bytes, count, date } from "./format.js";
import { ask, Poll } from "./poll.js";
import { fixedRange, onRange, rangeQuery, rangeText } from "./range.js";
import { chosenRun, nameWithRank, onScope, shownRun } from "./scope.js";

const TIERS = [
  { label: "segments", hint: "Inputs of segments that wait for their backward, and their programs", field: "segment_bytes", colour: "blue", kind: "area" },
  { label: "working", hint: "The recomputation in progress, and those that are ready", field: "working_bytes", colour: "orange", kind: "area" },
  { label: "results", hint: "Finished results, which are kept for repeated requests", field: "result_bytes", colour: "green", kind: "area" },
  { label: "cached", hint: "Tensors for the next step, such as parameters; evicted when memory is needed", field: "cached_bytes", colour: "sky", kind: "area" },
];
const HELD = [{ label: "held for this run", hint: "Tensors that the run's segments name", field: "held_bytes", colour: "blue", kind: "area" }];
const TRAINER = [
  { label: "trainer’s peak", hint: "Peak memory of the trainer so far", field: "trainer_peak_bytes", colour: "vermilion", kind: "line" },
  { label: "saved by workers", hint: "Bytes that the trainer would need in addition without workers", field: "saved_bytes", colour: "green", kind: "line", dash: [6, 3] },
];
const POINTS = 240;
const POINTS_OF_MANY = 90; // one answer has all workers, so each of many workers gets fewer points
const MANY = 8;
const OFTEN_MS = 1000;
const SELDOM_MS = 3000;
const SILENT_S = 60; // a run without samples for this long has no session; longer than an interval of the widest range
const MOST_HEADROOM = 2.5; // a budget further above the data than this would press it flat
const MARKS = { eviction: ["▼", "purple"], refusal: ["✕", "vermilion"] };

let shown = null; // the history in the left chart
let view = "";
let poll = null;

const held = new Chart(byId("memory-held"), {
  stacked: true,
  isBytes: true,
  x: "time",
  height: 250,
  top: (max) => (shown && showsBudget(max) ? Math.max(max, shown.budget_bytes) : max),
  paint: paintBudgetAndMarks,
  legendExtras: () => [
    element("li", { id: "memory-budget-key", title: "The most memory that the worker may use, set by --memory" }),
    element("li", { id: "memory-evictions", title: "Cached tensors that made room" }),
    element("li", { id: "memory-refusals", title: "Requests that the worker refused for lack of memory" }),
  ],
});
const trainer = new Chart(byId("memory-trainer"), {
  isBytes: true,
  x: "time",
  height: 250,
  series: TRAINER,
});

/** Returns whether the scale reaches up to the budget, given the largest value in bytes. */
function showsBudget(max) {
  return state("budget") === "1" || shown.budget_bytes < MOST_HEADROOM * max;
}

/** Draws a dashed line at the budget, and a shape at the upper edge for each eviction or refusal. */
function paintBudgetAndMarks(context, { left, top, width, since, until }, { uplot }) {
  if (shown === null) return;
  const y = uplot.valToPos(shown.budget_bytes, "y");
  context.strokeStyle = colour("bad");
  context.lineWidth = 1.5;
  if (y >= 0 && shown.budget_bytes > 0) {
    context.setLineDash([6, 4]);
    context.beginPath();
    context.moveTo(left, top + y);
    context.lineTo(left + width, top + y);
    context.stroke();
  }
  context.font = "12px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "top";
  for (const mark of shown.marks ?? []) {
    if (mark.at_s < since || mark.at_s > until) continue;
    const [shape, name] = MARKS[mark.kind];
    context.fillStyle = colour(name);
    context.fillText(shape, left + uplot.valToPos(mark.at_s, "x"), top + (mark.kind === "refusal" ? 13 : 0));
  }
}

function showMarks(history) {
  const total = (kind) => (history.marks ?? []).filter((mark) => mark.kind === kind).reduce((sum, mark) => sum + mark.count, 0);
  const fields = (history.marks ? TIERS : HELD).map((tier) => history[tier.field]);
  const most = Math.max(0, ...history.at_s.map((_, i) => fields.reduce((sum, list) => sum + list[i], 0)));
  const isOnScale = showsBudget(most) || most >= history.budget_bytes;
  byId("memory-budget-key").replaceChildren(swatchOf({ colour: "bad", kind: "line", dash: [6, 4] }), "budget", element("b", {}, bytes(history.budget_bytes)), isOnScale ? "" : "(above)");
  for (const [kind, [shape, name]] of Object.entries(MARKS)) {
    const swatch = element("span", { class: "swatch mark", "aria-hidden": "true" }, shape);
    swatch.style.color = `var(--${name})`;
    byId(`memory-${kind}s`).replaceChildren(swatch, `${kind}s`, element("b", {}, count(total(kind))));
    byId(`memory-${kind}s`).hidden = history.marks === undefined;
  }
}

function options(history) {
  return [
    { label: "Worker", options: history.workers.map((worker) => [`worker ${worker.worker}`, worker.worker]) },
    { label: "Run", options: history.runs.map((run) => [`run ${run.run}`, `${nameWithRank(run.run)} (${run.trainer})`]) },
  ].filter((group) => group.options.length > 0);
}

/** Returns how old the last numbers of a worker are, "last answer 4 min ago"; "" while it answers, or for a fixed range. */
function ageOfWorker(address) {
  const worker = workerAt(address);
  return worker && !fixedRange() ? ageOf(worker) : "";
}

/** Returns until when bytes were held for a run that has no session with a worker that answers; "" if it has one. */
function ageOfRun(history) {
  const lastS = history.at_s.at(-1);
  return lastS !== undefined && !fixedRange() && timeOfNumbers() - lastS > SILENT_S ? `until ${date(lastS, true)}` : "";
}

function whySilent(address) {
  const worker = workerAt(address);
  if (!worker?.seen_at_s) return "This worker has not answered yet. The table of workers shows its state.";
  return `This worker last answered on ${date(worker.seen_at_s, true)}. Choose a longer time range to see what it held.`;
}

function showHeld(history, kind) {
  const series = kind === "run" ? HELD : TIERS;
  if (view !== kind) {
    held.setSeries(series);
    view = kind;
  }
  shown = history;
  const lists = series.map((tier) => history[tier.field]);
  const total = lists.reduce((sum, list) => sum + (list.at(-1) ?? 0), 0);
  const parts = series.map((tier, i) => `${tier.label} ${bytes(lists[i].at(-1) ?? 0)}`).join(", ");
  const who = kind === "run" ? `Held for run ${nameWithRank(history.run)} on all of its workers` : `Held by worker ${history.worker}`;
  const age = kind === "run" ? ageOfRun(history) : ageOfWorker(history.worker);
  held.caption = [who, age].filter(Boolean).join(", ");
  held.update(
    [history.at_s, ...lists],
    `${who}, ${rangeText()}: ${fixedRange() ? "at its end" : age || "now"} ${bytes(total)} of ${bytes(history.budget_bytes)}; ${parts}.`,
    history.at_s.length > 0 ? "" : fixedRange() ? "Nothing was recorded in this time range. Choose another one at the top." : whySilent(history.worker),
  );
  showMarks(history);
}

function showTrainer(run) {
  trainer.caption = run ? `Memory of trainer ${run.trainer}` : "Memory of the trainer";
  const isEmpty = run === undefined || !run.trainer_peak_bytes.some((value) => value > 0);
  trainer.update(
    run ? [run.at_s, run.trainer_peak_bytes.map((value) => value || null), run.saved_bytes] : [[], [], []],
    run ? `Trainer ${run.trainer}: peak ${bytes(run.trainer_peak_bytes.at(-1))}, saved by workers ${bytes(run.saved_bytes.at(-1))}.` : "",
    isEmpty ? "No trainer has reported a step in this time range. Start one with backhaul.connect(), or choose a longer time range." : "",
  );
}

async function refresh(signal) {
  const workers = byId("memory-of").querySelectorAll("optgroup:first-child option").length;
  poll.intervalMs = workers > MANY ? SELDOM_MS : OFTEN_MS;
  const history = await ask("api/v1/memory", { ...rangeQuery(), points: workers > MANY ? POINTS_OF_MANY : POINTS }, signal);
  const chosen = setOptions(byId("memory-of"), options(history), state("memory"));
  const name = chosen.slice(chosen.indexOf(" ") + 1);
  const run = history.runs.find((one) => one.run === name);
  const worker = history.workers.find((one) => one.worker === name);
  if (chosen.startsWith("run ") && run) showHeld(run, "run");
  else if (worker) showHeld(worker, "worker");
  else {
    held.setSeries(TIERS);
    held.update([[], [], [], [], []], "", "No worker is being watched. Start the dashboard with --worker ADDRESS.");
  }
  const ofRun = (id) => history.runs.find((one) => one.run === id);
  showTrainer(run ?? (chosenRun() ? ofRun(chosenRun()) : (ofRun(shownRun()) ?? history.runs[0])));
}

export function startMemory() {
  poll = new Poll(byId("memory"), OFTEN_MS, refresh, { events: [onRange, onScope] });
  bind(byId("memory-of"), "memory");
  const box = byId("memory-budget");
  const showBudget = () => {
    box.checked = state("budget") === "1";
    held.draw();
    if (shown) showMarks(shown);
  };
  box.addEventListener("change", () => change({ budget: box.checked ? "1" : "" }));
  onChange(["budget"], showBudget);
  box.checked = state("budget") === "1";
  onChange(["memory"], () => poll.now());
}
