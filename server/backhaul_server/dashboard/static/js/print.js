// The whole page at once: for a print, and for a full-page screenshot of an address with ?all=1.

import { address, onChange, state } from "./address.js";
import { drawAllNow } from "./colour.js";
import { byId, setText, speak } from "./dom.js";
import { date } from "./format.js";
import { loadAll, loadSeen } from "./poll.js";
import { rangeTimes } from "./range.js";
import { chosenName } from "./scope.js";

const root = document.documentElement;
let themeBefore = null;

/** Returns after the browser has laid out and drawn the page, charts included. */
const drawn = () => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(resolve, 60))));

/** Shows every section in full. Sets data-loaded on the body when all of them have their numbers. */
async function showAll() {
  document.body.classList.add("is-all");
  await loadAll();
  await drawn();
  document.body.dataset.loaded = "true";
}

function showSeen() {
  document.body.classList.remove("is-all");
  delete document.body.dataset.loaded;
  loadSeen();
}

async function printAll() {
  speak("Loading all sections for the print");
  document.body.classList.add("is-printed"); // the width of paper, to which charts adapt only on screen
  await showAll();
  await drawn();
  print();
  document.body.classList.remove("is-printed");
  if (state("all") === "") showSeen();
}

/** Says on paper what is printed: the run, the rank, the time and the address. */
function showPrinted() {
  const now = new Date();
  const parts = [
    state("run") === "" ? "All runs" : `Run ${chosenName()}`,
    state("run") === "" && state("rank") !== "" ? `rank ${state("rank")}` : "",
    rangeTimes(),
    `printed on ${date(now.getTime() / 1000)} ${now.getFullYear()}`,
    new URL(address({ all: "" }), location.href).href,
  ];
  setText(byId("print-details"), parts.filter(Boolean).join(" · "));
}

/** Paper is white, whatever the theme. */
function toPaper() {
  showPrinted();
  themeBefore = root.dataset.theme ?? "";
  root.dataset.theme = "light";
  drawAllNow();
}

function toScreen() {
  if (themeBefore) root.dataset.theme = themeBefore;
  else delete root.dataset.theme;
  drawAllNow();
}

function follow() {
  if (state("all") === "1") showAll();
  else showSeen();
}

async function share() {
  const button = byId("share");
  const link = new URL(address(), location.href).href;
  try {
    await navigator.clipboard.writeText(link);
    button.lastElementChild.textContent = "Copied";
    speak("The link to this view is copied");
  } catch {
    // The clipboard is refused, as it is without TLS: the address bar has the same link.
    prompt("Link to this view", link);
  }
  setTimeout(() => (button.lastElementChild.textContent = "Copy link"), 2000);
}

export function startPrinting() {
  byId("share").addEventListener("click", share);
  byId("print").addEventListener("click", printAll);
  addEventListener("keydown", (event) => {
    if (event.key !== "p" || !(event.ctrlKey || event.metaKey) || event.shiftKey || event.altKey) return;
    event.preventDefault();
    printAll();
  });
  addEventListener("beforeprint", toPaper);
  addEventListener("afterprint", toScreen);
  onChange(["all"], follow);
  follow();
}
