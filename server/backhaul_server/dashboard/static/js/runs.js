// Runs, including those of the history: the table with its search, and a comparison of up to six of them.

import { bind, change, offer, onChange, state } from "./address.js";
import { Chart, swatchOf } from "./chart.js";
import { RUN_COLOURS, RUN_DASHES } from "./colour.js";
import { byId, element, setText } from "./dom.js";
import { bytes, count, date, loss, milliseconds, NONE, percent, signedMilliseconds } from "./format.js";
import { overSteps } from "./link.js";
import { CursorPages } from "./pages.js";
import { ask, Poll, RefusedError } from "./poll.js";
import { fixedRange, onRange, rangeQuery } from "./range.js";
import { chooseRun, hasChosenRank, learnRuns, nameWithRank, onScope, runOf } from "./scope.js";
import { facts, linkTo, problems, stateOf, Table } from "./table.js";
import { tagsOf } from "./verdict.js";

const MOST = RUN_COLOURS.length;
const CHARTS = {
  step_ms: { format: milliseconds },
  peak_bytes: { isBytes: true },
  moved_bytes: { isBytes: true },
  loss: { format: (value) => (value === null ? loss(value) : value.toFixed(Math.abs(value) < 10 ? 2 : 1)), fitsBelow: true },
};
const charts = {};
let table = null;
let poll = null;
let pages = null;
let list = [];
let usual = []; // ids that are compared while the viewer has not chosen any
let drawn = "";

const COLUMNS = [
  { title: "Compare", isText: true, cell: boxCell },
  { title: "Run", isText: true, cell: nameCell },
  { title: "State", isText: true, cell: (run) => stateOf(run.state) },
  { title: "Saved", cell: (run) => percent(run.verdict.saved_share), hint: "Memory that the trainer did not need, as a share of its peak without Backhaul" },
  { title: "Added", cell: (run) => added(run.verdict), hint: "Wait and overhead, minus the recomputation that workers spared the trainer. Below zero, a step is faster than one that recomputes on the trainer" },
  { title: "Trainer", isText: true, cell: (run) => run.trainer },
  { title: "Started", cell: (run) => date(run.started_at_s) },
  { title: "Steps", cell: (run) => count(run.steps) },
  { title: "Step time", cell: (run) => milliseconds(run.median_step_ms), hint: "Median of the last 50 steps" },
  { title: "Trainer peak", cell: (run) => bytes(run.peak_bytes) },
  { title: "Sent", cell: (run) => bytes(run.up_bytes) },
  { title: "Received", cell: (run) => bytes(run.down_bytes) },
  problems("Fallbacks", "fallbacks"),
  { title: "Last loss", cell: (run) => loss(run.last_loss) },
];

function boxCell(run) {
  const picked = pickedRuns();
  const isPicked = picked.includes(run.run);
  const isFull = !isPicked && picked.filter(Boolean).length >= MOST;
  const box = element("input", { type: "checkbox", "aria-label": `Compare run ${nameWithRank(run.run)}`, "data-run": run.run, checked: isPicked ? "" : undefined, disabled: isFull ? "" : undefined });
  box.addEventListener("change", () => {
    box.toggleAttribute("checked", box.checked); // so that it stays when the table is shown again, with its focus
    choose(run.run, box.checked);
  });
  return box;
}

/** Returns the name of a run, or its id, as a button that has the whole page show the run; below it the tags. */
function nameCell(run) {
  const show = (id) => {
    chooseRun(id);
    byId("overview").scrollIntoView();
  };
  return [linkTo(run.run, nameWithRank(run.run), "Show this run on the whole page", show), element("span", { class: "tags" }, ...tagsOf(run.tags))];
}

function added(verdict) {
  return verdict.added_ms === null ? NONE : signedMilliseconds(verdict.added_ms - verdict.spared_ms);
}

/** Returns the ids of the compared runs by the index of their colour, with "" for a free colour. */
function pickedRuns() {
  return state("compare") === "" ? usual : state("compare").split(",").slice(0, MOST);
}

/** Gives a run the first free colour, which it keeps while it is compared; or takes its colour away. */
function choose(run, isChosen) {
  const picked = Array.from({ length: MOST }, (_, i) => pickedRuns()[i] ?? "");
  if (isChosen) picked[picked.indexOf("")] = run;
  else picked[picked.indexOf(run)] = "";
  change({ compare: picked.some(Boolean) ? picked.join() : "none" });
}

function chosen() {
  return pickedRuns().flatMap((id, i) => {
    const run = list.find((one) => one.run === id) ?? runOf(id);
    return run ? [{ run, colour: RUN_COLOURS[i], dash: RUN_DASHES[i] }] : [];
  });
}

function showChoice() {
  const runs = chosen();
  byId("compare").hidden = runs.length === 0;
  setText(byId("runs-hint"), runs.length === 0 ? `Select up to ${MOST} to compare` : `${runs.length} of at most ${MOST} selected`);
  byId("compare-legend").replaceChildren(
    ...runs.map((one) => element("li", {}, swatchOf({ ...one, kind: "line" }), nameWithRank(one.run.run))),
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
  host.querySelector("thead").replaceChildren(element("tr", {}, head("Setting", "col"), ...runs.map((run) => head(nameWithRank(run.run), "col"))));
  host.querySelector("tbody").replaceChildren(
    ...differing.map((name) => element("tr", {}, head(name, "row"), ...runs.map((run) => element("td", { class: "text" }, run.settings[name] ?? "not set")))),
  );
}

function drawCharts(runs, all) {
  const signature = runs.map((one) => `${one.run.run} ${one.colour}`).join();
  for (const [field, chart] of Object.entries(charts)) {
    if (signature !== drawn) {
      chart.setSeries(runs.map((one) => ({ label: nameWithRank(one.run.run), colour: one.colour, dash: one.dash, kind: "line" })));
    }
    const tables = all.map((series) => [series.step, series[field].map((value) => (field === "loss" ? value : value || null))]);
    const joined = tables.length ? uPlot.join(tables) : [[]];
    const isEmpty = !joined.slice(1).some((values) => values.some((value) => value !== null && value !== undefined));
    const last = runs.map((one, i) => `${nameWithRank(one.run.run)} ${chart.options.format(all[i][field].at(-1) ?? null)}`);
    chart.update(
      joined,
      `${chart.caption} at the last step: ${last.join(", ")}.`,
      !isEmpty ? "" : field === "loss" ? "No loss was reported. Report it with session.step(loss)." : fixedRange() ? "These runs have no step in this time range." : "These runs have not reported a step yet.",
    );
  }
  drawn = signature;
}

async function refresh(signal) {
  const answer = await ask("api/v1/runs", { query: state("search"), tag: state("tag"), ...pages.query }, signal);
  learnRuns(answer.items);
  list = answer.items;
  if (usual.length === 0) usual = list.filter((run) => run.steps > 0).slice(0, 2).map((run) => run.run);
  pages.show(answer);
  offerTags();
  showTable();
  showChoice();
  const runs = chosen();
  if (runs.length === 0) return;
  // A live range would leave nothing of the runs of yesterday, so only a fixed one cuts the comparison.
  const asked = { points: 300, ...(fixedRange() ? rangeQuery() : {}) };
  const all = await Promise.all(runs.map((one) => stepsOf(one.run.run, asked, signal)));
  drawCharts(runs, all);
}

/** Returns the steps of a run; none if the dashboard has forgotten the run, so that the others are still compared. */
async function stepsOf(run, asked, signal) {
  try {
    return await ask(`api/v1/runs/${encodeURIComponent(run)}/steps`, asked, signal);
  } catch (error) {
    if (!(error instanceof RefusedError)) throw error;
    return { step: [], ...Object.fromEntries(Object.keys(CHARTS).map((field) => [field, []])) };
  }
}

function showTable() {
  const isFiltered = state("search") || state("tag") || state("rank");
  table.update(
    list.filter((run) => hasChosenRank(run.run)),
    isFiltered
      ? "No run matches. Choose another word, tag or rank."
      : "No runs yet. Every training that connects to one of these workers appears in this table and stays in it.",
  );
}

/** Offers the tags of listed runs for selection. The selected one stays in the list. */
function offerTags() {
  const tags = [...new Set(list.flatMap((run) => run.tags))].sort();
  offer(byId("runs-tag"), "tag", "any", tags.map((tag) => [tag, tag]));
  byId("runs-tag").closest("label").hidden = byId("runs-tag").options.length < 2;
}

/** Returns the steps that the comparison is zoomed to, or null. */
function zoomed() {
  const match = /^(\d+)-(\d+)$/.exec(state("between"));
  return match && Number(match[2]) > Number(match[1]) ? [Number(match[1]), Number(match[2])] : null;
}

function showZoom() {
  byId("compare-all").hidden = zoomed() === null;
  for (const chart of Object.values(charts)) chart.draw();
}

function details(run) {
  return [
    ...(run.notes ? [element("p", { class: "notes" }, run.notes)] : []),
    facts(Object.keys(run.settings).length ? run.settings : { Settings: "not reported" }),
    facts({ Id: run.run, Workers: run.workers.join(", "), Version: run.client_version, ...run.fingerprint }),
  ];
}

export function startRuns() {
  for (const [field, options] of Object.entries(CHARTS)) {
    const figure = byId(`compare-${field}`);
    charts[field] = new Chart(figure, { x: "step", height: 190, link: overSteps, xRange: zoomed, hasLegend: false, ...options });
    figure.dataset.scope = "by step";
  }
  table = new Table(byId("runs-table"), COLUMNS, (run) => run.run, { expands: 5, details });
  pages = new CursorPages(table, "runs", 25, () => poll.now());
  poll = new Poll(byId("runs"), 2000, refresh, { events: [onRange] });
  bind(byId("runs-search"), "search");
  bind(byId("runs-tag"), "tag");
  const begin = () => {
    pages.reset();
    poll.now();
  };
  onChange(["search", "tag"], begin);
  onChange(["compare"], () => {
    showTable();
    showChoice();
    poll.now();
  });
  onChange(["between"], showZoom);
  byId("compare-all").addEventListener("click", () => change({ between: "" }));
  onScope(showTable);
  showZoom();
}
