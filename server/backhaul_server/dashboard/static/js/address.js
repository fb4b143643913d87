// The state of the page in its address: a link shows the same to somebody else, and the back button undoes a choice.

import { setOptions } from "./dom.js";

/** The values that are left out of the address. A parameter that is not listed is ignored and dropped. */
const DEFAULTS = {
  run: "", // id of a run; "" shows all runs, or the newest where only one can be shown
  rank: "", // rank of the run's job; "" shows all ranks
  range: "600", // seconds up to now, or "SINCE-UNTIL" in seconds since 1970
  memory: "", // "worker ADDRESS" or "run ID"; "" is the first worker
  budget: "", // "1": the memory chart reaches up to the budget
  worker: "", // address of the worker whose latency is shown; "" is all workers
  rpc: "", // method whose durations the heat map shows; "" is all methods
  steps: "3", // steps of the timeline
  rows: "phases", // rows of the timeline: "phases" or "micro-batches"
  filter: "", // text that segments must contain
  reason: "", // reason that segments must have
  sort: "segment", // column of the table of segments
  order: "", // "down": largest first
  workers: "", // column by which workers are sorted; "" is the order of the command line
  "workers-order": "", // "down": largest first
  "workers-filter": "", // text that workers must contain
  node: "", // selected node of the topology
  links: "", // "problems": only links that are broken or idle
  severity: "", // lowest severity of listed events
  events: "", // text that listed events must contain
  search: "", // text that runs must contain
  tag: "", // tag that runs must have
  compare: "", // ids of compared runs, separated by commas; "" compares the two newest
  between: "", // "FIRST-LAST": steps that the comparison is zoomed to
  all: "", // "1": every section is loaded and shown in full, for a screenshot or a print
};

const TYPING_MS = 200;
const listeners = [];
let values = read();

function read() {
  const given = new URLSearchParams(location.search);
  return Object.fromEntries(Object.entries(DEFAULTS).map(([name, usual]) => [name, given.get(name) ?? usual]));
}

/** Returns the value of a parameter of the address, or its default. */
export function state(name) {
  return values[name];
}

/** Returns the address of the page with its present state and, if given, with changes to it. */
export function address(changes = {}) {
  const wanted = Object.entries({ ...values, ...changes }).filter(([name, value]) => value !== DEFAULTS[name]);
  const query = new URLSearchParams(wanted).toString();
  return location.pathname + (query ? `?${query}` : "") + location.hash;
}

/**
 * Changes parameters and calls the listeners of those that differ.
 * @param {boolean} replaces whether the back button skips the change, as it should for each typed letter
 */
export function change(changes, replaces = false) {
  const before = values;
  const wanted = Object.fromEntries(Object.entries(changes).map(([name, value]) => [name, String(value)]));
  if (Object.entries(wanted).every(([name, value]) => before[name] === value)) return;
  const target = address(wanted);
  if (replaces) history.replaceState(null, "", target);
  else history.pushState(null, "", target);
  values = { ...values, ...wanted };
  notify(before);
}

/** Calls back after any of these parameters has changed: by the page, or by the back and forward buttons. */
export function onChange(names, callback) {
  listeners.push({ names, callback });
}

function notify(before) {
  const changed = Object.keys(DEFAULTS).filter((name) => values[name] !== before[name]);
  for (const { names, callback } of listeners) {
    if (names.some((name) => changed.includes(name))) callback();
  }
}

addEventListener("popstate", () => {
  const before = values;
  values = read();
  notify(before);
});

/** Keeps a select or a search field and a parameter equal. A field is read once nothing more was typed for a moment. */
export function bind(control, name) {
  const isText = control.tagName === "INPUT";
  let timer = 0;
  const show = () => {
    if (control.value === state(name)) return;
    control.value = state(name);
    if (isText || control.value === state(name)) return;
    control.append(new Option(state(name))); // an address may have what the list does not offer
    control.value = state(name);
  };
  const read = () => change({ [name]: control.value.trim() }, isText);
  control.addEventListener(isText ? "input" : "change", () => {
    clearTimeout(timer);
    if (isText) timer = setTimeout(read, TYPING_MS);
    else read();
  });
  onChange([name], () => {
    if (!isText || control !== document.activeElement) show();
  });
  show();
}

/** Sets the options of a select: `usual` for "", then `[value, text]`. What the address has is always among them. */
export function offer(select, name, usual, options) {
  const isMissing = state(name) !== "" && !options.some(([value]) => value === state(name));
  setOptions(select, [["", usual], ...options, ...(isMissing ? [[state(name), state(name)]] : [])], state(name));
}
