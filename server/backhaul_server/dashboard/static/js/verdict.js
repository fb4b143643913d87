// What became of a run, in one sentence at the top of the page, with its name, tags and notes.

import { byId, element, icon, setAttribute, setIcon, setText } from "./dom.js";
import { runName } from "./format.js";
import { onScope, nameOf, runOf, shownRun } from "./scope.js";

/** Shows the tags of a run. */
export function paintTags(host, tags) {
  const signature = tags.join("\n");
  if (host.dataset.shown === signature) return;
  host.dataset.shown = signature;
  host.replaceChildren(...tags.map((tag) => element("span", { class: "tag" }, tag)));
}

/** Returns the icon and the level of a verdict. */
function lookOf(verdict) {
  if (verdict.is_worth_it === null) return ["idle", "idle"];
  return verdict.is_worth_it ? ["ok", "good"] : ["warning", "warn"];
}

/** Shows the verdict on the chosen run, or on the newest. */
export function showVerdict() {
  const host = byId("verdict");
  const run = runOf(shownRun());
  host.hidden = run === undefined;
  if (run === undefined) return;
  const [name, level] = lookOf(run.verdict);
  if (host.querySelector(".icon") === null) host.prepend(icon(name));
  setIcon(host.querySelector(".icon"), name);
  setAttribute(host, "data-level", level);
  setText(byId("verdict-run"), nameOf(run.run));
  const parts = [run.name ? runName(run.run) : "", run.world_size > 1 ? `rank ${run.rank} of ${run.world_size}` : "", run.trainer, run.state];
  setText(byId("verdict-about"), parts.filter(Boolean).join(" · "));
  setText(byId("verdict-text"), `${run.verdict.sentence}.`);
  paintTags(byId("verdict-tags"), run.tags);
  setText(byId("verdict-notes"), run.notes);
  byId("verdict-notes").hidden = run.notes === "";
}

export function startVerdict() {
  onScope(showVerdict);
}
