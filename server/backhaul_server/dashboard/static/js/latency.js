// Latency: the duration of RPCs on workers, its distribution over time, and the phases of a run's steps.

import { bind, change, onChange, state } from "./address.js";
import { Chart } from "./chart.js";
import { LANE_COLOURS } from "./colour.js";
import { addCopyButton } from "./copy.js";
import { byId, element, explain, setAttribute, setOptions, setText } from "./dom.js";
import { count, milliseconds, threeDigits } from "./format.js";
import { heatMap } from "./heat.js";
import { overTimedSteps } from "./link.js";
import { ask, Poll } from "./poll.js";
import { onRange, rangeBounds, rangeQuery } from "./range.js";
import { isUnknown, nameWithRank, onScope, shownRun } from "./scope.js";
import { moveWithArrows } from "./table.js";

const KEPT_S = 900; // the dashboard forgets older durations
const PHASES = {
  upload: "Sending the inputs of segments to workers",
  queue: "Waiting on a worker for earlier segments",
  recompute: "Computing the forward of segments again on workers",
  backward: "Backward of segments on workers",
  download: "Fetching gradients or activations from workers",
};
const MEANINGS = {
  GetTelemetry: "a dashboard asks for numbers",
  OpenSession: "a trainer connects",
  KeepSession: "a trainer says that it is there",
  CloseSession: "a trainer leaves",
  PutProgram: "send what a segment computes",
  PutTensors: "send tensors",
  PutStripes: "send parts of large tensors",
  GetStripes: "fetch parts of large tensors",
  SaveSegment: "save the inputs of a segment",
  ShortSaves: "save the inputs of short segments",
  Recompute: "recompute a segment, return activations",
  Backward: "recompute a segment, return gradients",
  ShortBackwards: "the same for short segments",
  Ahead: "push gradients that are ready early",
  ReleaseSegments: "free segments",
  CollectGradients: "fetch gradients of parameters",
  FetchSources: "fetch values that segments made",
  PutReports: "report steps and calls",
};
const rows = new Map();
const heat = heatMap();
let times = []; // when each step of the chart of phases began
const phases = new Chart(byId("phases"), {
  stacked: true,
  format: milliseconds,
  x: "step",
  height: 230,
  link: overTimedSteps(() => times),
  series: [
    ...Object.entries(PHASES).map(([phase, hint]) => ({ label: phase, hint, colour: LANE_COLOURS[phase], kind: "bars" })),
    { label: "exposed wait", hint: "Time for which backward was blocked by workers", colour: "vermilion", kind: "line" },
  ],
});
let poll = null;

function pick(chosen) {
  change({ rpc: state("rpc") === chosen ? "" : chosen });
}

function showPicked() {
  for (const [name, row] of rows) setAttribute(row, "aria-selected", name === state("rpc"));
}

function rowOf(name) {
  const row = element("tr", { tabindex: "0", "aria-selected": name === state("rpc") }, ...Array.from({ length: 6 }, () => element("td")));
  row.cells[0].append(element("span"), element("span", { class: "sub" }));
  row.addEventListener("click", () => pick(name));
  row.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    pick(name);
  });
  rows.set(name, row);
  return row;
}

function showRpcs(rpcs) {
  const table = byId("rpcs");
  const body = table.tBodies[0];
  rpcs.forEach((rpc, i) => {
    const row = rows.get(rpc.method) ?? rowOf(rpc.method);
    const values = [rpc.method, count(rpc.calls), count(rpc.errors), ...[rpc.p50_ms, rpc.p90_ms, rpc.p99_ms].map(milliseconds)];
    values.forEach((value, c) => setText(c === 0 ? row.cells[0].firstChild : row.cells[c], value));
    setText(row.cells[0].lastChild, MEANINGS[rpc.method] ?? "");
    row.cells[2].classList.toggle("errors", rpc.errors > 0);
    if (body.rows[i] !== row) body.insertBefore(row, body.rows[i] ?? null);
  });
  for (const [name, row] of rows) {
    if (rpcs.some((rpc) => rpc.method === name)) continue;
    row.remove();
    rows.delete(name);
  }
  table.hidden = rpcs.length === 0;
  explain(
    byId("latency").querySelector(".block .empty"),
    rpcs.length === 0 ? "No calls in this time range. Start a training with backhaul.connect(), or choose a longer time range." : "",
  );
}

function showPhases(all) {
  const shown = all.find((one) => one.run === shownRun()) ?? (state("run") ? undefined : all[0]);
  const isKept = shown !== undefined || state("run") === "";
  const names = Object.keys(PHASES);
  const lists = names.map((phase) => shown?.[`${phase}_ms`] ?? []);
  const isEmpty = !shown || shown.step.length === 0;
  const caption = byId("phases").querySelector("figcaption");
  setText(caption, shown ? `Remote time of a step by phase, run ${nameWithRank(shown.run)}` : "Remote time of a step by phase");
  times = shown?.at_s ?? [];
  phases.update(
    [shown?.step ?? [], ...lists, shown?.wait_ms ?? []],
    isEmpty ? "" : `Run ${nameWithRank(shown.run)}, step ${shown.step.at(-1)}: ${names.map((phase) => `${phase} ${threeDigits(shown[`${phase}_ms`].at(-1))} ms`).join(", ")}, exposed wait ${threeDigits(shown.wait_ms.at(-1))} ms.`,
    !isEmpty
      ? ""
      : isKept
        ? "No step with remote segments was reported in this time range. Each step appears here when it ends."
        : "Phases are kept only of runs that reported since the dashboard was started, and this run is not among them.",
  );
}

async function refresh(signal) {
  const run = shownRun();
  const asked = { ...rangeQuery(KEPT_S), run: isUnknown(run) ? "" : run, worker: state("worker"), method: state("rpc") };
  const latency = await ask("api/v1/latency", asked, signal);
  const [since] = rangeBounds();
  byId("latency-kept").hidden = since > Date.now() / 1000 - KEPT_S - 1;
  showRpcs(latency.rpcs);
  heat.update(latency.heat, asked.method);
  showPhases(latency.phases);
}

/** Offers the workers of a live event for selection. */
export function offerWorkers(workers) {
  const addresses = workers.map((worker) => worker.address);
  if (state("worker") && !addresses.includes(state("worker"))) addresses.push(state("worker"));
  setOptions(byId("latency-worker"), [["", "all"], ...addresses.map((address) => [address, address])]);
  byId("latency-worker").value = state("worker");
}

export function startLatency() {
  poll = new Poll(byId("latency"), 2000, refresh);
  bind(byId("latency-worker"), "worker");
  onChange(["rpc"], showPicked);
  onChange(["worker", "rpc"], () => poll.now());
  onRange(() => poll.now());
  onScope(() => poll.now());
  moveWithArrows(byId("rpcs").tBodies[0]);
  for (const figure of ["heat", "phases"]) addCopyButton(byId(figure));
}
