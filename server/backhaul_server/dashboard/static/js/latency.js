// Latency: the duration of RPCs on workers, its distribution over time, and the phases of a run's steps.

import { Chart } from "./chart.js";
import { LANE_COLOURS } from "./colour.js";
import { byId, element, explain, setAttribute, setOptions, setText } from "./dom.js";
import { count, milliseconds, runName, threeDigits } from "./format.js";
import { heatMap } from "./heat.js";
import { ask, Poll } from "./poll.js";
import { moveWithArrows } from "./table.js";

const PHASES = ["upload", "queue", "recompute", "backward", "download"];
const rows = new Map();
const heat = heatMap();
const phases = new Chart(byId("phases"), {
  stacked: true,
  format: milliseconds,
  x: "step",
  height: 230,
  series: [
    ...PHASES.map((phase) => ({ label: phase, colour: LANE_COLOURS[phase], kind: "bars" })),
    { label: "exposed wait", colour: "vermilion", kind: "line" },
  ],
});
let method = "";
let poll = null;

function pick(chosen) {
  method = method === chosen ? "" : chosen;
  for (const [name, row] of rows) setAttribute(row, "aria-selected", name === method);
  poll.now();
}

function rowOf(name) {
  const row = element("tr", { tabindex: "0", "aria-selected": name === method }, ...Array.from({ length: 6 }, () => element("td")));
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
    values.forEach((value, c) => setText(row.cells[c], value));
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
    rpcs.length === 0 ? "No calls in this window. Start a training with backhaul.connect(), or choose a longer window." : "",
  );
}

function showPhases(all) {
  const chosen = setOptions(byId("phases-run"), all.map((one) => [one.run, runName(one.run)]));
  const shown = all.find((one) => one.run === chosen);
  byId("phases-run").parentElement.hidden = all.length === 0;
  const lists = PHASES.map((phase) => shown?.[`${phase}_ms`] ?? []);
  const isEmpty = !shown || shown.step.length === 0;
  phases.update(
    [shown?.step ?? [], ...lists, shown?.wait_ms ?? []],
    isEmpty ? "" : `Run ${runName(shown.run)}, step ${shown.step.at(-1)}: ${PHASES.map((phase) => `${phase} ${threeDigits(shown[`${phase}_ms`].at(-1))} ms`).join(", ")}, exposed wait ${threeDigits(shown.wait_ms.at(-1))} ms.`,
    isEmpty ? "No trainer has reported a step with remote segments in this window. Each step appears here when it ends." : "",
  );
}

async function refresh(signal) {
  const latency = await ask("/api/v1/latency", { seconds: byId("latency-window").value, worker: byId("latency-worker").value, method }, signal);
  showRpcs(latency.rpcs);
  heat.update(latency.heat, method);
  showPhases(latency.phases);
}

/** Offers the workers of a live event for selection. */
export function offerWorkers(workers) {
  setOptions(byId("latency-worker"), [["", "all"], ...workers.map((worker) => [worker.address, worker.address])]);
}

export function startLatency() {
  poll = new Poll(byId("latency"), 2000, refresh);
  for (const id of ["latency-worker", "latency-window", "phases-run"]) byId(id).addEventListener("change", () => poll.now());
  moveWithArrows(byId("rpcs").tBodies[0]);
}
