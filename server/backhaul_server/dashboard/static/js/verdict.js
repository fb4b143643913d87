// What became of a run, in one sentence at the top of the page, with its name, tags and notes.

import { state } from "./address.js";
import { byId, element, explain, icon, setAttribute, setIcon, setText, show } from "./dom.js";
import { duration, runName } from "./format.js";
import { chooseRun, isUnknown, nameOf, nameWithRank, onScope, peersOf, runOf, shownRun } from "./scope.js";
import { linkTo } from "./table.js";

const MOST_OTHERS = 5;
let live = { runs: [], overview: { at_s: 0 } };

/** Returns the tags of a run as nodes. */
export function tagsOf(tags) {
  return tags.map((tag) => element("span", { class: "tag" }, tag));
}

const isUnheard = (run) => run.state === "silent" || run.state === "lost";

/** Returns the icon and the level of a run: those of its verdict, unless nobody hears from the run. */
function lookOf(run) {
  if (isUnheard(run) || run.verdict.is_worth_it === null) return ["idle", "idle"];
  return run.verdict.is_worth_it ? ["ok", "good"] : ["warning", "warn"];
}

function textOf(run, values = "") {
  const known = [run.verdict.sentence, values].filter(Boolean).map((sentence) => `${sentence}.`).join(" ");
  return isUnheard(run) ? `Not heard from for ${duration(live.overview.at_s - run.heard_at_s)}. Until then: ${known}` : known;
}

/** Shows the verdict on the chosen run, or on the newest, and below it a line for each other run that is running. */
export function showVerdict(event = live) {
  live = event;
  const id = shownRun();
  const run = runOf(id);
  byId("verdict").hidden = run === undefined && !isUnknown(id);
  if (run !== undefined) showRun(run);
  else if (isUnknown(id)) showUnknown(id);
}

function showRun(run) {
  showLook(...lookOf(run));
  setText(byId("verdict-run"), nameOf(run.run));
  const parts = [
    state("run") === "" ? "newest run" : "",
    run.name ? runName(run.run) : "",
    run.world_size > 1 ? `rank ${run.rank} of ${run.world_size}` : "",
    run.trainer,
    run.state,
  ];
  setText(byId("verdict-about"), parts.filter(Boolean).join(" · "));
  setText(byId("verdict-text"), textOf(run, run.verdict.values));
  const isOther = (one) => state("run") === "" && one.state === "running" && peersOf(one.run)[0] === one.run && !peersOf(run.run).includes(one.run);
  show(byId("verdict-others"), live.runs.filter(isOther).slice(0, MOST_OTHERS).map(lineOf));
  show(byId("verdict-tags"), tagsOf(run.tags));
  explain(byId("verdict-notes"), run.notes);
}

function lineOf(run) {
  const [name, level] = lookOf(run);
  return element("li", { "data-level": level }, icon(name), linkTo(run.run, nameWithRank(run.run), "Show this run on the whole page", chooseRun), ` ${textOf(run)}`);
}

/** Explains a link to a run that has been forgotten, or that is of another dashboard. */
function showUnknown(id) {
  showLook("warning", "warn");
  setText(byId("verdict-run"), runName(id));
  setText(byId("verdict-about"), "unknown run");
  setText(byId("verdict-text"), `This dashboard knows no run "${id}".`);
  for (const part of ["verdict-tags", "verdict-others"]) show(byId(part));
  explain(byId("verdict-notes"), "The link may be of another dashboard, or the run is no longer in the history. Choose another run at the top.");
}

function showLook(name, level) {
  const host = byId("verdict");
  setIcon(host.querySelector(".icon"), name);
  setAttribute(host, "data-level", level);
}

export function startVerdict() {
  onScope(() => showVerdict());
}
