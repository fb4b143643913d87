// Draws the topology as SVG. A node's state is its shape, its colour and, unless all is well, a word; a link's is its
// stroke, its colour and, where it is broken, a cross.

import { element, setAttribute, setText, svgElement } from "./dom.js";
import { ago, duration } from "./format.js";
import { STATES } from "./table.js";
import { hideTip, showTip } from "./tip.js";
import { curve, place, rowsOf, signatureOf } from "./topology_layout.js";

const ROWS = [4, 7, 11, 15, 20, 26, 34]; // heights of a row, in pixels
const LABELLED_ROW = 11; // lower rows have no room for text
const FIT_HEIGHT = 480; // of all rows, in pixels
const ROOMY = 5; // index of the highest row that is chosen without a click
const ROOM_FOR_WORDS = 128; // width of a label in pixels; in a narrower one only shape and colour show the state
const FEWEST_CHARACTERS = 5; // of a label that has been shortened
const LONGEST_END = 8; // characters that are kept at the end of such a label
const ruler = document.createElement("canvas").getContext("2d"); // measures text
const THIN = 1;
const THICK = 5.5;
const SHAPES = {
  good: "M-5,0 a5,5 0 1,0 10,0 a5,5 0 1,0 -10,0 Z",
  warn: "M0,-5.5 L5.8,4.8 L-5.8,4.8 Z",
  bad: "M-5,-5 L5,-5 L5,5 L-5,5 Z M-2.5,-2.5 L2.5,2.5 M2.5,-2.5 L-2.5,2.5",
  idle: "M-4.2,0 a4.2,4.2 0 1,0 8.4,0 a4.2,4.2 0 1,0 -8.4,0 Z",
};

export class Diagram {
  /**
   * @param {HTMLElement} figure receives the drawing
   * @param {{onSelect: (id: string) => void, textOf: (node: object, links: object[]) => string}} options
   */
  constructor(figure, options) {
    this.options = options;
    this.svg = svgElement("svg", { class: "diagram", role: "group", "aria-label": "Topology" });
    this.plot = element("div", { class: "plot diagram-plot scroll", tabindex: "-1" }, this.svg);
    figure.append(this.plot);
    this.topology = { at_s: 0, nodes: [], links: [] };
    this.row = null; // index in ROWS; null fits
    this.selected = "";
    new ResizeObserver(() => this.#draw()).observe(this.plot);
    this.svg.addEventListener("keydown", (event) => this.#onKey(event));
  }

  update(topology, selected) {
    this.topology = topology;
    this.selected = selected;
    this.#draw();
  }

  zoom(steps) {
    this.row = Math.min(ROWS.length - 1, Math.max(0, (this.row ?? this.#fitting()) + steps));
    this.#draw();
  }

  fit() {
    this.row = Math.max(0, this.#highest());
    this.#draw();
  }

  /** Returns the highest row with which everything fits; -1 if there is none. */
  #highest() {
    const rows = rowsOf(this.topology);
    return ROWS.findLastIndex((row) => row * rows <= FIT_HEIGHT);
  }

  /** Returns the row that is used until the viewer zooms: as high as fits, but high enough for labels. */
  #fitting() {
    return Math.min(ROOMY, Math.max(ROWS.indexOf(15), this.#highest()));
  }

  #draw() {
    const width = this.plot.clientWidth;
    if (width === 0) return;
    const row = ROWS[this.row ?? this.#fitting()];
    const signature = `${width} ${row} ${signatureOf(this.topology)}`;
    if (signature !== this.signature) this.#rebuild(width, row);
    this.signature = signature;
    this.#paint();
  }

  #rebuild(width, row) {
    const focused = this.svg.contains(document.activeElement) ? document.activeElement.dataset.id : null;
    const placed = place(this.topology, { width, row });
    this.placed = placed;
    setAttribute(this.svg, "width", width);
    setAttribute(this.svg, "height", placed.height);
    setAttribute(this.svg, "viewBox", `0 0 ${width} ${placed.height}`);
    this.links = new Map(this.topology.links.map((link) => [`${link.trainer}\n${link.worker}`, this.#linkOf(link)]));
    this.nodes = new Map(this.topology.nodes.map((node) => [node.id, this.#nodeOf(node, row)]));
    const heads = [["Trainers", placed.left, "end"], ["Workers", placed.right, "start"]].map(([text, x, anchor]) =>
      svgElement("text", { class: "head", x: x + (anchor === "end" ? 5 : -5), y: 12, "text-anchor": anchor }, text),
    );
    this.svg.replaceChildren(
      svgElement("g", { class: "links", "aria-hidden": "true" }, ...[...this.links.values()].map((one) => one.group)),
      ...heads,
      svgElement("g", {}, ...[...this.nodes.values()].map((one) => one.group)),
    );
    if (focused !== null) this.nodes.get(focused)?.group.focus();
  }

  #linkOf(link) {
    const { d, x, y } = curve(link, this.placed);
    const line = svgElement("path", { class: "wire", d });
    const cross = svgElement("path", { class: "cross", d: "M-4,-4 L4,4 M4,-4 L-4,4", transform: `translate(${x},${y})` });
    return { group: svgElement("g", { class: "link-group" }, line, cross), line, cross };
  }

  #nodeOf(node, row) {
    const isTrainer = node.kind === "trainer";
    const x = isTrainer ? this.placed.left : this.placed.right;
    const y = this.placed.at.get(node.id);
    const box = { x: isTrainer ? 0 : x - 9, y: y - row / 2, width: this.placed.label + 9, height: row, rx: 4 };
    const shape = svgElement("path", { class: "shape", transform: `translate(${x},${y}) scale(${Math.min(1, row / 14)})` });
    const text = svgElement("text", { x: x + (isTrainer ? -12 : 12), y: y, "text-anchor": isTrainer ? "end" : "start", dy: "0.35em" });
    const group = svgElement("g", { class: "node", role: "button", tabindex: "-1", "data-id": node.id }, svgElement("rect", { class: "node-box", ...box }), shape, ...(row >= LABELLED_ROW ? [text] : []));
    group.style.fontSize = `${fontSize(row)}px`;
    group.addEventListener("click", () => this.options.onSelect(node.id));
    group.addEventListener("pointermove", (event) => {
      this.#emphasize(node.id);
      const shown = this.topology.nodes.find((one) => one.id === node.id);
      if (shown) showTip(event, this.options.textOf(shown, this.#linksOf(node.id)));
    });
    group.addEventListener("pointerleave", () => {
      this.#emphasize(this.selected);
      hideTip();
    });
    group.addEventListener("focus", () => this.#emphasize(node.id));
    group.addEventListener("blur", () => this.#emphasize(this.selected));
    return { group, shape, text };
  }

  #linksOf(id) {
    return this.topology.links.filter((link) => link.trainer === id || link.worker === id);
  }

  #paint() {
    const most = Math.max(1, ...this.topology.links.map(flow));
    for (const link of this.topology.links) {
      const { group, line } = this.links.get(`${link.trainer}\n${link.worker}`);
      setAttribute(group, "data-state", link.state);
      const share = Math.sqrt(flow(link) / most);
      setAttribute(line, "stroke-width", (THIN + (THICK - THIN) * share).toFixed(2));
    }
    const room = this.placed.label - 14;
    ruler.font = `600 ${fontSize(this.placed.row)}px Inter, system-ui, sans-serif`;
    this.topology.nodes.forEach((node, i) => {
      const { group, shape, text } = this.nodes.get(node.id);
      const [, level] = STATES[node.state];
      setAttribute(group, "data-level", level);
      setAttribute(shape, "d", SHAPES[level]);
      const word = level === "good" || room < ROOM_FOR_WORDS ? "" : ` ${this.#wordOf(node, room)}`;
      setText(text, shortened(node.label, room - ruler.measureText(word).width) + word);
      const links = this.#linksOf(node.id).length;
      setAttribute(group, "aria-label", `${node.kind} ${node.label}, ${stateOf(node, this.topology.at_s)}, ${links} ${links === 1 ? "link" : "links"}`);
      setAttribute(group, "aria-pressed", node.id === this.selected);
      const isStop = this.nodes.has(this.selected) ? node.id === this.selected : i === 0;
      setAttribute(group, "tabindex", isStop ? "0" : "-1");
    });
    this.#emphasize(this.selected);
  }

  /** Returns the state of a node as a word, with its age where both fit beside the whole label. */
  #wordOf(node, room) {
    if (node.state !== "unreachable" || node.seen_at_s === 0) return node.state;
    const aged = `${node.state} for ${duration(this.topology.at_s - node.seen_at_s)}`;
    return ruler.measureText(`${node.label} ${aged}`).width <= room ? aged : node.state;
  }

  /** Shows the links of a node, and dims all others; "" dims none. */
  #emphasize(id) {
    const isChosen = this.nodes?.has(id) ?? false;
    this.svg.classList.toggle("is-dimmed", isChosen);
    const near = new Set([id]);
    for (const link of this.topology.links) {
      const isOn = isChosen && (link.trainer === id || link.worker === id);
      this.links.get(`${link.trainer}\n${link.worker}`)?.group.classList.toggle("is-on", isOn);
      if (isOn) near.add(link.trainer).add(link.worker);
    }
    for (const [key, { group }] of this.nodes ?? []) group.classList.toggle("is-on", isChosen && near.has(key));
  }

  #onKey(event) {
    const id = event.target.dataset?.id;
    if (id === undefined) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.options.onSelect(id);
      return;
    }
    const next = this.#neighbour(id, event.key);
    if (next === null) return;
    event.preventDefault();
    this.nodes.get(next).group.focus();
  }

  /** Returns the node that an arrow key leads to: the next of the column, or the nearest of the other one. */
  #neighbour(id, key) {
    const kind = this.topology.nodes.find((node) => node.id === id).kind;
    const y = (one) => this.placed.at.get(one);
    const ids = (isOwn) => this.topology.nodes.filter((node) => (node.kind === kind) === isOwn).map((node) => node.id);
    if (key === "ArrowDown" || key === "ArrowUp") {
      const column = ids(true).sort((a, b) => y(a) - y(b));
      return column[column.indexOf(id) + (key === "ArrowDown" ? 1 : -1)] ?? null;
    }
    if (key !== (kind === "trainer" ? "ArrowRight" : "ArrowLeft")) return null;
    return ids(false).sort((a, b) => Math.abs(y(a) - y(id)) - Math.abs(y(b) - y(id)))[0] ?? null;
  }
}

/** Returns the bytes per second of a link in both directions; 0 where they are unknown. */
export function flow(link) {
  return (link.up_bytes_per_s ?? 0) + (link.down_bytes_per_s ?? 0);
}

/** Returns the state of a node, with its last answer if it is an unreachable worker: nothing newer is known of it. */
export function stateOf(node, nowS) {
  if (node.state !== "unreachable") return node.state;
  return `unreachable, ${node.seen_at_s === 0 ? "never answered" : `last answer ${ago(node.seen_at_s, nowS)}`}`;
}

function fontSize(row) {
  return Math.min(12.5, Math.max(10, row - 4));
}

/** Shortens a label in its middle until it fits into a width in pixels: its end, such as a port, tells nodes apart. */
function shortened(label, width) {
  let shown = label;
  for (let left = label.length - 1; left >= FEWEST_CHARACTERS && ruler.measureText(shown).width > width; left -= 1) {
    const end = Math.min(LONGEST_END, Math.ceil(left / 2));
    shown = `${label.slice(0, left - end)}…${label.slice(-end)}`;
  }
  return shown;
}
