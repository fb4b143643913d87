// Marks of events over charts: a line at the time of each event, with its text on hover. The event log has the same text.

import { element } from "./dom.js";
import { clock } from "./format.js";
import { hideTip, showTip } from "./tip.js";

const NEAR_PIXELS = 9; // marks closer than this are one
const MOST_LINES = 6; // of text in a tip
const SHAPES = { info: "●", warning: "▲", critical: "✕" };
const RANKS = Object.keys(SHAPES);
const layers = new Set();
let events = [];

/** Marks these events, as the API lists them, on all charts. */
export function markEvents(list) {
  events = [...list].sort((a, b) => a.at_s - b.at_s);
  for (const layer of layers) layer.place();
}

/** Merges events that are near each other, given the pixels per second. */
function clusters(shown, perS) {
  const merged = [];
  for (const event of shown) {
    const last = merged.at(-1);
    if (last && (event.at_s - last.at_s) * perS < NEAR_PIXELS) last.events.push(event);
    else merged.push({ at_s: event.at_s, events: [event] });
  }
  return merged;
}

function textOf(cluster) {
  const lines = cluster.events.slice(0, MOST_LINES).map((event) => `${clock(event.at_s)} ${event.text}`);
  const rest = cluster.events.length - lines.length;
  return [...lines, ...(rest > 0 ? [`and ${rest} more`] : [])].join("\n");
}

export class MarkLayer {
  /**
   * @param {HTMLElement} plot positioned element that holds the chart
   * @param {() => object | null} area returns `{left, top, width, height, since, until}` of the chart, or null if there
   *   is no chart now
   */
  constructor(plot, area) {
    this.area = area;
    this.host = element("div", { class: "marks", "aria-hidden": "true" });
    plot.append(this.host);
    layers.add(this);
  }

  /** Puts the marks where the chart now has their times. Call after each drawing of the chart. */
  place() {
    const area = this.area();
    const shown = area === null ? [] : events.filter((event) => event.at_s >= area.since && event.at_s <= area.until);
    const perS = area === null ? 0 : area.width / (area.until - area.since);
    const wanted = clusters(shown, perS);
    const signature = JSON.stringify([area, wanted.map((cluster) => [cluster.at_s, cluster.events.length])]);
    if (signature === this.signature) return;
    this.signature = signature;
    if (this.host.matches(":hover")) hideTip(); // of a mark that goes
    this.host.replaceChildren(...wanted.map((cluster) => markOf(cluster, area, perS)));
  }
}

function markOf(cluster, area, perS) {
  const severity = RANKS[Math.max(...cluster.events.map((event) => RANKS.indexOf(event.severity)))];
  const mark = element("span", { class: "event-mark", "data-severity": severity }, element("span", {}, SHAPES[severity]));
  mark.style.transform = `translate(${(area.left + (cluster.at_s - area.since) * perS).toFixed(1)}px, ${area.top}px)`;
  mark.style.height = `${area.height}px`;
  mark.addEventListener("pointermove", (pointer) => showTip(pointer, textOf(cluster)));
  mark.addEventListener("pointerleave", hideTip);
  return mark;
}
