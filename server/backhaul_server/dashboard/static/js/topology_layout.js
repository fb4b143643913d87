// Where the nodes and links of the topology are: trainers on the left, workers on the right, in an order that keeps links
// from crossing as far as a few sweeps can.

const SWEEPS = 6;
const TOP = 30;
const BOTTOM = 10;
const FEWEST_ROWS = 3;

/** Returns the state of the topology from which positions follow: the same signature, the same positions. */
export function signatureOf(topology) {
  return JSON.stringify([topology.nodes.map((node) => node.id), topology.links.map((link) => [link.trainer, link.worker])]);
}

/** Returns the rows that the longer column needs. */
export function rowsOf({ nodes }) {
  const workers = nodes.filter((node) => node.kind === "worker").length;
  return Math.max(workers, nodes.length - workers, FEWEST_ROWS);
}

/**
 * Places nodes and links.
 * @param {object} topology as the API returns it
 * @param {{width: number, row: number}} size width of the drawing and height of a row, in pixels
 * @returns {{height: number, left: number, right: number, label: number, row: number, at: Map<string, number>}} the x of
 *   both columns, the width of a label, the height of a row, and the y of each node by its id
 */
export function place(topology, { width, row }) {
  const [trainers, workers] = order(topology);
  const rows = rowsOf(topology);
  const at = new Map();
  for (const column of [trainers, workers]) {
    // The shorter column is spread over the height of the longer one.
    const gap = (rows * row) / Math.max(1, column.length);
    column.forEach((id, i) => at.set(id, TOP + (i + 0.5) * gap));
  }
  const label = Math.min(270, width * 0.31);
  return { height: TOP + rows * row + BOTTOM, left: label, right: width - label, label, row, at };
}

/** Returns the ids of trainers and of workers, ordered by the mean position of what they are linked to. */
function order(topology) {
  const ids = (kind) => topology.nodes.filter((node) => node.kind === kind).map((node) => node.id);
  const columns = [ids("trainer"), ids("worker")];
  const linked = new Map(topology.nodes.map((node) => [node.id, []]));
  for (const { trainer, worker } of topology.links) {
    linked.get(trainer)?.push(worker);
    linked.get(worker)?.push(trainer);
  }
  for (let sweep = 0; sweep < SWEEPS; sweep += 1) {
    const [moved, fixed] = sweep % 2 === 0 ? [1, 0] : [0, 1];
    const position = new Map(columns[fixed].map((id, i) => [id, i / Math.max(1, columns[fixed].length)]));
    const before = new Map(columns[moved].map((id, i) => [id, i]));
    const wanted = new Map(columns[moved].map((id, i) => [id, meanOf(linked.get(id), position) ?? i / Math.max(1, columns[moved].length)]));
    columns[moved].sort((a, b) => wanted.get(a) - wanted.get(b) || before.get(a) - before.get(b));
  }
  return columns;
}

function meanOf(ids, position) {
  const known = ids.filter((id) => position.has(id));
  return known.length === 0 ? null : known.reduce((sum, id) => sum + position.get(id), 0) / known.length;
}

/** Returns the curve of a link, as the `d` of a path, and its middle. */
export function curve(link, placed) {
  const [from, to] = [placed.at.get(link.trainer), placed.at.get(link.worker)];
  const [x1, x2] = [placed.left + 9, placed.right - 9];
  const bend = (x2 - x1) * 0.42;
  return { d: `M${x1},${from} C${x1 + bend},${from} ${x2 - bend},${to} ${x2},${to}`, x: (x1 + x2) / 2, y: (from + to) / 2 };
}
