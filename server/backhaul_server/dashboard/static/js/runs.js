// Runs, including those of the history: the table, and a comparison of up to six of them.

import { Chart } from "./chart.js";
import { colour, drawInTheme, RUN_COLOURS, RUN_DASHES } from "./colour.js";
import { byId, element, explain, setText } from "./dom.js";
import { bytes, count, date, loss, milliseconds, runName } from "./format.js";
import { ask, Poll } from "./poll.js";
import { facts, paintState, Table } from "./table.js";

const MOST = RUN_COLOURS.length;
const CHARTS = {
  step_ms: { format: milliseconds },
  peak_bytes: { format: bytes, isBytes: true },
  moved_bytes: { format: bytes, isBytes: true },
  loss: { format: (value) => (value === null ? loss(value) : value.toFixed(Math.abs(value) < 10 ? 2 : 1)), fitsBelow: true },
};
const charts = {};
const picked = []; // ids of runs, by the index of their colour
let table = null;
let poll = null;
let list = [];
let isTouched = false;
let drawn = "";

const COLUMNS = [
  { title: "Compare", isText: true, paint: paintBox },
  { title: "Run", isText: true, cell: (run) => runName(run.run) },
  { title: "State", isText: true, paint: (cell, run) => paintState(cell, run.state) },
  { title: "Trainer", isText: true, cell: (run) => run.trainer },
  { title: "Started", cell: (run) => date(run.started_at_s) },
  { title: "Steps", cell: (run) => count(run.steps) },
  { title: "Step time", cell: (run) => milliseconds(run.median_step_ms), hint: "Median of the last 50 steps" },
  { title: "Trainer peak", cell: (run) => bytes(run.peak_bytes) },
  { title: "Sent", cell: (run) => bytes(run.up_bytes) },
  { title: "Received", cell: (run) => bytes(run.down_bytes) },
  { title: "Fallbacks", paint: (cell, run) => {
    setText(cell, count(run.fallbacks));
    cell.classList.toggle("errors", run.fallbacks > 0);
  } },
  { title: "Last loss", cell: (run) => loss(run.last_loss) },
];

function paintBox(cell, run) {
  let box = cell.querySelector("input");
  if (box === null) {
    box = element("input", { type: "checkbox", "aria-label": `Compare run ${runName(run.run)}` });
    box.addEventListener("change", () => choose(run.run, box.checked));
    cell.append(box);
  }
  box.checked = picked.includes(run.run);
  box.disabled = !box.checked && picked.filter(Boolean).length >= MOST;
}

function choose(run, isChosen) {
  isTouched = true;
  if (isChosen) take(run);
  else picked[picked.indexOf(run)] = undefined;
  table.update(list);
  showChoice();
  poll.now();
}

/** Gives a run the first free colour, which it keeps while it is picked. */
function take(run) {
  const free = Array.from({ length: MOST }, (_, i) => i).find((i) => !picked[i]);
  picked[free] = run;
}

function chosen() {
  return picked.flatMap((run, i) => {
    const known = run && list.find((one) => one.run === run);
    return known ? [{ run: known, colour: RUN_COLOURS[i], dash: RUN_DASHES[i] }] : [];
  });
}

function showChoice() {
  const runs = chosen();
  byId("compare").hidden = runs.length === 0;
  setText(byId("runs-hint"), runs.length === 0 ? `Select up to ${MOST} to compare` : `${runs.length} of at most ${MOST} selected`);
  byId("compare-legend").replaceChildren(
    ...runs.map((one) => {
      const swatch = element("span", { class: `swatch line${one.dash.length > 2 || one.dash[0] > 2 ? " dashed" : one.dash.length ? " dotted" : ""}`, "aria-hidden": "true" });
      swatch.style.borderColor = colour(one.colour);
      return element("li", {}, swatch, runName(one.run.run), element("span", {}, one.run.settings.returns ?? one.run.trainer));
    }),
  );
  showDifferences(runs.map((one) => one.run));
}

/** Shows the settings in which the compared runs differ. */
function showDifferences(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))].sort();
  const differing = names.filter((name) => new Set(runs.map((run) => run.settings[name])).size > 1);
  const host = byId("differences");
  host.hidden = runs.length < 2 || differing.length === 0;
  const head = (value, scope) => element("th", { class: "text", scope }, value);
  host.querySelector("thead").replaceChildren(element("tr", {}, head("Setting", "col"), ...runs.map((run) => head(runName(run.run), "col"))));
  host.querySelector("tbody").replaceChildren(
    ...differing.map((name) => element("tr", {}, head(name, "row"), ...runs.map((run) => element("td", { class: "text" }, run.settings[name] ?? "not set")))),
  );
}

function drawCharts(runs, all) {
  const signature = runs.map((one) => `${one.run.run} ${one.colour}`).join();
  for (const [field, chart] of Object.entries(charts)) {
    if (signature !== drawn) {
      chart.setSeries(runs.map((one) => ({ label: runName(one.run.run), colour: one.colour, dash: one.dash, kind: "line" })));
    }
    const tables = all.map((series) => [series.step, series[field].map((value) => (field === "loss" ? value : value || null))]);
    const joined = tables.length ? uPlot.join(tables) : [[]];
    const isEmpty = !joined.slice(1).some((values) => values.some((value) => value !== null && value !== undefined));
    const last = runs.map((one, i) => `${runName(one.run.run)} ${CHARTS[field].format(all[i][field].at(-1) ?? null)}`);
    chart.update(
      joined,
      `${byId(`compare-${field}`).querySelector("figcaption").textContent} at the last step: ${last.join(", ")}.`,
      !isEmpty ? "" : field === "loss" ? "No loss was reported. Report it with session.step(loss)." : "These runs have not reported a step yet.",
    );
  }
  drawn = signature;
}

async function refresh(signal) {
  list = (await ask("/api/v1/runs", {}, signal)).items;
  if (!isTouched && picked.length === 0) list.filter((run) => run.steps > 0).slice(0, 2).forEach((run) => take(run.run));
  table.update(list);
  byId("runs-table").hidden = list.length === 0;
  explain(
    byId("runs").querySelector(":scope > .empty"),
    list.length === 0 ? "No runs yet. Every training that connects to one of these workers appears in this table and stays in it." : "",
  );
  showChoice();
  const runs = chosen();
  if (runs.length === 0) return;
  const all = await Promise.all(runs.map((one) => ask(`/api/v1/runs/${encodeURIComponent(one.run.run)}/steps`, { points: 300 }, signal)));
  drawCharts(runs, all);
}

export function startRuns() {
  for (const [field, options] of Object.entries(CHARTS)) {
    charts[field] = new Chart(byId(`compare-${field}`), { x: "step", height: 190, hasLegend: false, ...options });
  }
  table = new Table(byId("runs-table"), COLUMNS, (run) => run.run, {
    expands: 1,
    details: (run) => [
      facts(Object.keys(run.settings).length ? run.settings : { Settings: "not reported" }),
      facts({ Workers: run.workers.join(", "), Version: run.client_version, ...run.fingerprint }),
    ],
  });
  poll = new Poll(byId("runs"), 2000, refresh);
  drawInTheme(showChoice);
}
