// The panel beside the timeline: what became of the call whose bar is selected.

import { LANE_COLOURS } from "./colour.js";
import { byId, element, icon } from "./dom.js";
import { bytes, count, drift, milliseconds } from "./format.js";
import { facts } from "./table.js";

/**
 * Shows the call of a bar.
 * @param {object} timeline as the API returns it
 * @param {object} bar a span of the timeline
 * @param {() => void} onClose called when the viewer closes the panel
 */
export function showCall(timeline, bar, onClose) {
  const call = timeline.calls[bar.call];
  const list = facts({
    Step: call.step,
    Worker: call.worker || "none",
    ...(call.micro_batch ? { "Micro-batch": call.micro_batch } : {}),
    Program: call.is_known ? "known" : "recorded",
    ...(call.recorded_because ? { "Recorded because": call.recorded_because } : {}),
    Decision: call.decision || "not recomputed",
    Sent: bytes(call.up_bytes),
    Received: bytes(call.down_bytes),
    "Own overhead": milliseconds(call.overhead_ms),
    Retries: count(call.retries),
    Mismatches: count(call.mismatches),
    Drift: drift(call.drift),
    ...Object.fromEntries(phasesOf(timeline, bar.call)),
    ...(call.reason ? { Why: call.reason } : {}),
  });
  const close = element("button", { type: "button", class: "icon-only quiet", "aria-label": "Close" }, icon("close"));
  close.addEventListener("click", onClose);
  const title = element("h3", {}, call.segment, call.is_fallback ? element("span", { class: "error" }, " fallback") : "");
  byId("call").replaceChildren(element("div", { class: "call-head" }, title, close), list);
  byId("call").hidden = false;
}

export function hideCall() {
  byId("call").hidden = true;
}

/** Returns the phases of a call with the time that each of them took. */
function phasesOf(timeline, call) {
  return Object.keys(LANE_COLOURS).flatMap((lane) => {
    const spans = timeline.spans.filter((span) => span.call === call && span.lane === lane);
    const name = lane[0].toUpperCase() + lane.slice(1);
    return spans.length > 0 ? [[name, milliseconds(spans.reduce((sum, span) => sum + span.duration_ms, 0))]] : [];
  });
}
