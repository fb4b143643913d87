// What became of a run, in one sentence at the top of the page, with its name, tags and notes.

import { state } from "./address.js";
import { byId, element, explain, setAttribute, setIcon, setText, show } from "./dom.js";
import { runName } from "./format.js";
import { isUnknown, nameOf, onScope, runOf, shownRun } from "./scope.js";

/** Returns the tags of a run as nodes. */
export function tagsOf(tags) {
  return tags.map((tag) => element("span", { class: "tag" }, tag));
}

/** Returns the icon and the level of a verdict. */
function lookOf(verdict) {
  if (verdict.is_worth_it === null) return ["idle", "idle"];
  return verdict.is_worth_it ? ["ok", "good"] : ["warning", "warn"];
}

/** Shows the verdict on the chosen run, or on the newest. */
export function showVerdict() {
  const id = shownRun();
  const run = runOf(id);
  byId("verdict").hidden = run === undefined && !isUnknown(id);
  if (run !== undefined) showRun(run);
  else if (isUnknown(id)) showUnknown(id);
}

function showRun(run) {
  showLook(...lookOf(run.verdict));
  setText(byId("verdict-run"), nameOf(run.run));
  const parts = [
    state("run") === "" ? "newest run" : "",
    run.name ? runName(run.run) : "",
    run.world_size > 1 ? `rank ${run.rank} of ${run.world_size}` : "",
    run.trainer,
    run.state,
  ];
  setText(byId("verdict-about"), parts.filter(Boolean).join(" · "));
  setText(byId("verdict-text"), `${run.verdict.sentence}.`);
  show(byId("verdict-tags"), tagsOf(run.tags));
  explain(byId("verdict-notes"), run.notes);
}

/** Explains a link to a run that has been forgotten, or that is of another dashboard. */
function showUnknown(id) {
  showLook("warning", "warn");
  setText(byId("verdict-run"), runName(id));
  setText(byId("verdict-about"), "unknown run");
  setText(byId("verdict-text"), `This dashboard knows no run "${id}".`);
  show(byId("verdict-tags"));
  explain(byId("verdict-notes"), "The link may be of another dashboard, or the run is no longer in the history. Choose another run at the top.");
}

function showLook(name, level) {
  const host = byId("verdict");
  setIcon(host.querySelector(".icon"), name);
  setAttribute(host, "data-level", level);
}

export function startVerdict() {
  onScope(showVerdict);
}
