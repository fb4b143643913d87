// The time range of all charts: the last minutes, which move on ("live"), or a fixed range between two times.

import { change, onChange, state } from "./address.js";
import { byId, setAttribute, setOptions } from "./dom.js";
import { clock, date, duration } from "./format.js";

const LIVE_S = [60, 120, 300, 600, 900, 1800, 3600];
const FIXED = /^(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)$/;
const SHORTEST_S = 2;

/** Returns the fixed range as [since, until] in seconds since 1970, or null while the range is live. */
export function fixedRange() {
  const match = FIXED.exec(state("range"));
  if (match === null) return null;
  const [since, until] = [Number(match[1]), Number(match[2])];
  return until > since ? [since, until] : null;
}

/** Returns the seconds that a live range looks back. */
function liveSeconds() {
  const given = Number(state("range"));
  return LIVE_S.includes(given) ? given : 600;
}

/**
 * Returns the parameters of the range for the routes of the API.
 * @param {number} mostS the seconds for which the route keeps its numbers
 */
export function rangeQuery(mostS = Infinity) {
  const fixed = fixedRange();
  return fixed ? { since_s: fixed[0], until_s: fixed[1] } : { seconds: Math.min(mostS, liveSeconds()) };
}

/** Returns the range as [since, until] in seconds since 1970, by the clock of the viewer for a live range. */
export function rangeBounds() {
  return fixedRange() ?? [Date.now() / 1000 - liveSeconds(), Date.now() / 1000];
}

/** Describes the range: "last 10 min", "13:02:10 to 13:05:40". */
export function rangeText() {
  const fixed = fixedRange();
  if (fixed === null) return `last ${duration(liveSeconds())}`;
  const isToday = new Date(fixed[0] * 1000).toDateString() === new Date().toDateString();
  return isToday ? `${clock(fixed[0])} to ${clock(fixed[1])}` : `${date(fixed[0])} to ${date(fixed[1])}`;
}

/** Describes the range by its times, for a picture or a print that is looked at later: "25 Nov 13:02:10 to 13:12:10". */
export function rangeTimes() {
  const [since, until] = rangeBounds();
  const isOneDay = new Date(since * 1000).toDateString() === new Date(until * 1000).toDateString();
  return `${date(since, true)} to ${isOneDay ? clock(until) : date(until, true)}`;
}

/** Chooses a fixed range, as a drag over a chart does. */
export function chooseRange(since, until) {
  const middle = (since + until) / 2;
  const half = Math.max(SHORTEST_S, until - since) / 2;
  change({ range: `${rounded(middle - half)}-${rounded(middle + half)}` });
}

const rounded = (atS) => Number(atS.toFixed(2));

/** Calls back after the range has been changed. The passing of time is no change. */
export function onRange(callback) {
  onChange(["range"], callback);
}

/** Returns a time as a field for local dates and times shows it. */
function localText(atS) {
  const at = new Date(atS * 1000);
  return new Date(at.getTime() - at.getTimezoneOffset() * 60_000).toISOString().slice(0, 19);
}

function show() {
  const fixed = fixedRange();
  const own = fixed ? [state("range"), rangeText()] : ["fixed", "fixed range …"];
  const live = LIVE_S.map((seconds) => [String(seconds), `live, last ${duration(seconds)}`]);
  setOptions(byId("range"), [...live, own], fixed ? state("range") : String(liveSeconds()));
  byId("range-fixed").hidden = fixed === null;
  byId("range-live").hidden = fixed === null;
  setAttribute(document.body, "data-range", fixed ? "fixed" : "live");
  if (fixed === null) return;
  byId("range-since").value = localText(fixed[0]);
  byId("range-until").value = localText(fixed[1]);
}

function choose() {
  const value = byId("range").value;
  if (value === "fixed") chooseRange(...rangeBounds());
  else change({ range: value });
}

function read() {
  const [since, until] = ["range-since", "range-until"].map((id) => new Date(byId(id).value).getTime() / 1000);
  const isOrdered = until > since;
  setAttribute(byId("range-until"), "aria-invalid", Number.isFinite(until) && Number.isFinite(since) && !isOrdered ? "true" : null);
  if (isOrdered) chooseRange(since, until);
}

export function startRange() {
  byId("range").addEventListener("change", choose);
  for (const id of ["range-since", "range-until"]) byId(id).addEventListener("change", read);
  byId("range-live").addEventListener("click", () => change({ range: "600" }));
  byId("range-out").addEventListener("click", () => {
    const [since, until] = rangeBounds();
    const seconds = until - since;
    if (fixedRange()) chooseRange(since - seconds / 2, Math.min(until + seconds / 2, Date.now() / 1000));
    else change({ range: LIVE_S.find((one) => one > seconds + 1) ?? LIVE_S.at(-1) });
  });
  onRange(show);
  show();
}
