// Latency: the duration of RPCs on workers, its distribution over time, and the phases of a run's steps.

import { bind, change, offer, onChange, state } from "./address.js";
import { Chart } from "./chart.js";
import { LANE_COLOURS } from "./colour.js";
import { byId, element } from "./dom.js";
import { count, milliseconds, threeDigits } from "./format.js";
import { HeatMap } from "./heat.js";
import { overTimedSteps } from "./link.js";
import { ask, Poll } from "./poll.js";
import { onRange, rangeBounds, rangeQuery } from "./range.js";
import { isUnknown, nameWithRank, onScope, shownRun } from "./scope.js";
import { problems, sub, Table } from "./table.js";

const RETENTION_S = 900; // the dashboard forgets older durations
const PHASES = [
  { field: "upload", hint: "Sending the inputs of segments to workers" },
  { field: "queue", hint: "Waiting on a worker for earlier segments" },
  { field: "recompute", hint: "Computing the forward of segments again on workers" },
  { field: "backward", hint: "Backward of segments on workers" },
  { field: "download", hint: "Fetching gradients or activations from workers" },
  { field: "wait", label: "exposed wait", hint: "Time for which backward was blocked by workers", kind: "line" },
];
const MEANINGS = {
  GetTelemetry: "a dashboard asks for numbers",
  OpenSession: "a trainer connects",
  KeepSession: "a trainer says that it is there",
  CloseSession: "a trainer leaves",
  PutProgram: "send what a segment computes",
  PutTensors: "send tensors",
  Exchange: "requests that could not be read",
  Save: "save the inputs of a segment",
  Recompute: "recompute a segment, return activations",
  Backward: "recompute a segment, return gradients",
  Release: "free segments",
  CollectGradients: "fetch gradients of parameters",
  FetchSources: "fetch values that segments made",
  PutReports: "report steps and calls",
};
const heat = new HeatMap(byId("heat"));
let times = []; // when each step of the chart of phases began
const phases = new Chart(byId("phases"), {
  stacked: true,
  format: milliseconds,
  x: "step",
  height: 230,
  link: overTimedSteps(() => times),
  series: PHASES.map((phase) => ({ label: phase.field, colour: LANE_COLOURS[phase.field], kind: "bars", ...phase })),
});
let poll = null;
let rpcs = null;

const COLUMNS = [
  { title: "RPC", isText: true, cell: (rpc) => [element("span", {}, rpc.method), sub(MEANINGS[rpc.method])] },
  { title: "Calls", cell: (rpc) => count(rpc.calls) },
  problems("Errors", "errors"),
  ...[50, 90, 99].map((percentile) => ({ title: `p${percentile}`, cell: (rpc) => milliseconds(rpc[`p${percentile}_ms`]) })),
];

function showPhases(all) {
  const shown = all.find((one) => one.run === shownRun()) ?? (state("run") ? undefined : all[0]);
  const isKept = shown !== undefined || state("run") === "";
  const lists = PHASES.map(({ field }) => shown?.[`${field}_ms`] ?? []);
  const isEmpty = !shown || shown.step.length === 0;
  phases.caption = shown ? `Remote time of a step by phase, run ${nameWithRank(shown.run)}` : "Remote time of a step by phase";
  times = shown?.at_s ?? [];
  phases.update(
    [shown?.step ?? [], ...lists],
    isEmpty ? "" : `Run ${nameWithRank(shown.run)}, step ${shown.step.at(-1)}: ${PHASES.map(({ field, label }, i) => `${label ?? field} ${threeDigits(lists[i].at(-1))} ms`).join(", ")}.`,
    !isEmpty
      ? ""
      : isKept
        ? "No step with remote segments was reported in this time range. Each step appears here when it ends."
        : "Phases are kept only of runs that reported since the dashboard was started, and this run is not among them.",
  );
}

async function refresh(signal) {
  const run = shownRun();
  const asked = { ...rangeQuery(RETENTION_S), run: isUnknown(run) ? "" : run, worker: state("worker"), method: state("rpc") };
  const latency = await ask("api/v1/latency", asked, signal);
  const [since] = rangeBounds();
  byId("latency-retention").hidden = since > Date.now() / 1000 - RETENTION_S - 1;
  rpcs.update(latency.rpcs, "No calls in this time range. Start a training with backhaul.connect(), or choose a longer time range.");
  heat.update(latency.heat, asked.method);
  showPhases(latency.phases);
}

/** Offers the workers of a live event for selection. */
export function offerWorkers(workers) {
  offer(byId("latency-worker"), "worker", "all", workers.map((worker) => [worker.address, worker.address]));
}

export function startLatency() {
  rpcs = new Table(byId("rpcs"), COLUMNS, (rpc) => rpc.method, { onPick: (method) => change({ rpc: state("rpc") === method ? "" : method }) });
  const showPicked = () => rpcs.showPicked(state("rpc"));
  showPicked();
  poll = new Poll(byId("latency"), 2000, refresh, { events: [onRange, onScope] });
  bind(byId("latency-worker"), "worker");
  onChange(["rpc"], showPicked);
  onChange(["worker", "rpc"], () => poll.now());
}
