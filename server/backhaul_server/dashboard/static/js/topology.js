// The topology: which trainer uses which worker, and how each link fares; as a drawing, and as a table of links.

import { bind, change, onChange, state } from "./address.js";
import { addCopyButton } from "./copy.js";
import { byId, element, setText } from "./dom.js";
import { goToWorker } from "./fleet.js";
import { ago, count, milliseconds, offset, rate } from "./format.js";
import { LocalPages } from "./pages.js";
import { ask, Poll } from "./poll.js";
import { inScope, nameWithRank, onScope, runOf } from "./scope.js";
import { stateOf as stateNode, sub, Table } from "./table.js";
import { Diagram, flow, stateOf } from "./topology_diagram.js";

const SEVERITY = ["broken", "idle", "active"];
const LINKS_OF_A_PAGE = 12;
const RECENT_S = 10; // age of a link's last report up to which its numbers are those of now
let poll = null;
let diagram = null;
let table = null;
let pages = null;
let topology = { at_s: 0, nodes: [], links: [] };
let labels = new Map();

/** Returns how old the numbers of a link are, "4 min ago"; "" if they are those of now, or unknown. */
function ageOf(link) {
  const isOld = link.measured_at_s !== null && topology.at_s - link.measured_at_s > RECENT_S;
  return isOld ? ago(link.measured_at_s, topology.at_s) : "";
}

/** Returns a column of a measurement, with when it was made below it if that is not now. */
function measured(title, textOf, hint) {
  const age = (link) => (link.round_trip_ms === null ? "" : ageOf(link));
  const cell = (link) => element("span", age(link) ? { class: "old" } : {}, textOf(link), sub(age(link)));
  return { title, hint, cell };
}

const COLUMNS = [
  { title: "Trainer", isText: true, cell: (link) => labels.get(link.trainer) ?? link.trainer },
  { title: "Worker", isText: true, cell: (link) => labels.get(link.worker) ?? link.worker },
  { title: "Link", isText: true, cell: (link) => stateNode(link.state) },
  { title: "To worker", cell: (link) => rate(link.up_bytes_per_s), hint: "Bytes per second that the trainer sends" },
  { title: "To trainer", cell: (link) => rate(link.down_bytes_per_s), hint: "Bytes per second that the trainer receives" },
  measured("Round trip", (link) => milliseconds(link.round_trip_ms), "Time of a small request and its answer"),
  measured("Clock offset", (link) => offset(link.clock_offset_ms, link.clock_error_ms), "Worker's clock minus trainer's clock, and the largest possible error of this estimate"),
];

/** Returns what is shown of an answer: all workers and the chosen trainers, with the filter on links applied. */
function visible(answer) {
  const isChosen = inScope();
  const nodes = answer.nodes.filter((node) => node.kind === "worker" || isChosen(node.run)).map((node) => ({ ...node, label: labelOf(node) }));
  const ids = new Set(nodes.map((node) => node.id));
  const links = answer.links.filter((link) => ids.has(link.trainer) && ids.has(link.worker) && (state("links") === "" || link.state !== "active"));
  return { at_s: answer.at_s, nodes, links };
}

function show() {
  const shown = visible(topology);
  labels = new Map(shown.nodes.map((node) => [node.id, node.label]));
  diagram.update(shown, state("node"));
  const isSelected = labels.has(state("node"));
  const links = shown.links.filter((link) => !isSelected || link.trainer === state("node") || link.worker === state("node"));
  links.sort((a, b) => SEVERITY.indexOf(a.state) - SEVERITY.indexOf(b.state) || flow(b) - flow(a));
  table.update(pages.of(links), sentence(shown));
  const chosen = shown.nodes.find((node) => node.id === state("node"));
  byId("topology-selected").hidden = chosen === undefined;
  if (chosen) setText(byId("topology-selected").querySelector("span"), `${chosen.label}, ${stateOf(chosen, shown.at_s)}: ${count(links.length)} ${links.length === 1 ? "link" : "links"}`);
  byId("topology-go").hidden = chosen?.kind !== "worker";
  byId("topology-chart").hidden = shown.nodes.length === 0;
}

/** Returns how a node is called; ranks of a job have the same name. */
function labelOf(node) {
  if (node.kind === "trainer" && runOf(node.run) !== undefined) return nameWithRank(node.run);
  return node.world_size > 1 ? `${node.label} rank ${node.rank}` : node.label;
}

function sentence(shown) {
  if (shown.nodes.length === 0) return "No worker is being watched. Start the dashboard with --worker ADDRESS.";
  if (shown.links.length > 0) return "";
  return state("links") ? "Every link is active: there is no idle or broken one." : "No trainer is connected. Connect one with backhaul.connect(\"ADDRESS\").";
}

async function refresh(signal) {
  topology = await ask("api/v1/topology", {}, signal);
  show();
}

export function startTopology() {
  const figure = byId("topology-chart");
  diagram = new Diagram(figure, {
    onSelect: (id) => change({ node: state("node") === id ? "" : id }),
    textOf: (node, links) => [`${node.label}: ${stateOf(node, topology.at_s)}`, ...links.slice(0, 8).map((link) => linkText(node, link)), ...(links.length > 8 ? [`and ${count(links.length - 8)} more`] : [])].join("\n"),
  });
  figure.dataset.scope = "now";
  table = new Table(byId("links"), COLUMNS, (link) => `${link.trainer}\n${link.worker}`);
  pages = new LocalPages(table, "links", LINKS_OF_A_PAGE, show);
  poll = new Poll(byId("topology"), 2000, refresh);
  bind(byId("topology-links"), "links");
  onChange(["node", "links"], show);
  onScope(show);
  byId("topology-in").addEventListener("click", () => diagram.zoom(1));
  byId("topology-out").addEventListener("click", () => diagram.zoom(-1));
  byId("topology-fit").addEventListener("click", () => diagram.fit());
  byId("topology-clear").addEventListener("click", () => change({ node: "" }));
  byId("topology-go").addEventListener("click", () => {
    const node = topology.nodes.find((one) => one.id === state("node"));
    if (node) goToWorker(node.id.replace(/^worker:/, ""));
  });
  addCopyButton(figure);
}

function linkText(node, link) {
  const other = labels.get(node.kind === "worker" ? link.trainer : link.worker);
  return `${other}: ${link.state}, ${rate(link.up_bytes_per_s)} to the worker, ${rate(link.down_bytes_per_s)} to the trainer, round trip ${[milliseconds(link.round_trip_ms), ageOf(link)].filter(Boolean).join(", ")}`;
}
