// Asks the dashboard's own API once a second and draws what it says. Nothing here changes anything.

const TIERS = ["segments", "working", "results", "cached"];
const FIELDS = { segments: "segment_bytes", working: "working_bytes", results: "result_bytes", cached: "cached_bytes" };
const CHART = { left: 68, right: 640, top: 12, bottom: 172, height: 200 };
const SECONDS = 120;
const SVG = "http://www.w3.org/2000/svg";

const cards = new Map();
let answeredAt = 0;

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit === 0 || count >= 100 ? Math.round(count) : count.toFixed(1)} ${units[unit]}`;
}

function duration(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function milliseconds(seconds) {
  const value = seconds * 1000;
  return value >= 100 ? value.toFixed(0) : value.toFixed(2);
}

function card(address) {
  if (!cards.has(address)) {
    const fragment = document.getElementById("worker").content.cloneNode(true);
    const section = fragment.querySelector(".worker");
    section.querySelector(".address").textContent = address;
    document.getElementById("workers").append(fragment);
    cards.set(address, section);
  }
  return cards.get(address);
}

function element(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// The least of 1, 2, 5 times a power of 1024 that is above the value: ticks people can read.
function ceiling(value) {
  let unit = 1024;
  while (unit * 1024 <= value) unit *= 1024;
  for (const factor of [1, 2, 5, 10, 20, 50, 100, 200, 500, 1024]) {
    if (factor * unit >= value) return factor * unit;
  }
  return value;
}

function drawMemory(svg, history) {
  CHART.right = Math.max(240, svg.clientWidth) - 4; // one unit is one pixel, so that text has the page's size
  svg.setAttribute("viewBox", `0 0 ${CHART.right + 4} ${CHART.height}`);
  const now = Date.now() / 1000;
  const totals = history.at_s.map((_, i) => TIERS.reduce((sum, tier) => sum + history[FIELDS[tier]][i], 0));
  const top = ceiling(Math.max(1024, ...totals) * 1.05);
  const x = (at) => CHART.right - ((now - at) / SECONDS) * (CHART.right - CHART.left);
  const y = (value) => CHART.bottom - (value / top) * (CHART.bottom - CHART.top);
  const parts = [];
  for (const share of [0, 0.5, 1]) {
    const level = y(share * top);
    parts.push(element("line", { class: "grid", x1: CHART.left, x2: CHART.right, y1: level, y2: level }));
    parts.push(element("text", { x: CHART.left - 6, y: level + 4, "text-anchor": "end" }, bytes(share * top)));
  }
  for (const [ago, anchor] of [[SECONDS, "start"], [SECONDS / 2, "middle"], [0, "end"]]) {
    const label = ago === 0 ? "now" : `${ago} s ago`;
    parts.push(element("text", { x: x(now - ago), y: CHART.bottom + 20, "text-anchor": anchor }, label));
  }
  const shown = history.at_s.map((at, i) => i).filter((i) => now - history.at_s[i] <= SECONDS);
  const base = new Map(shown.map((i) => [i, 0]));
  for (const tier of TIERS) {
    const lower = shown.map((i) => `${x(history.at_s[i])},${y(base.get(i))}`).reverse();
    for (const i of shown) base.set(i, base.get(i) + history[FIELDS[tier]][i]);
    const upper = shown.map((i) => `${x(history.at_s[i])},${y(base.get(i))}`);
    if (shown.length > 1) parts.push(element("path", { class: tier, d: `M${[...upper, ...lower].join("L")}Z` }));
  }
  if (history.budget_bytes > 0 && history.budget_bytes <= top) {
    const level = y(history.budget_bytes);
    parts.push(element("line", { class: "budget", x1: CHART.left, x2: CHART.right, y1: level, y2: level }));
  }
  svg.replaceChildren(...parts);
}

function drawLatency(body, rpcs) {
  body.replaceChildren(
    ...rpcs.map((rpc) => {
      const row = document.createElement("tr");
      const cells = [rpc.method, rpc.calls, rpc.errors, ...[rpc.p50_s, rpc.p90_s, rpc.p99_s].map(milliseconds)];
      cells.forEach((value, index) => {
        const cell = document.createElement("td");
        cell.textContent = value;
        if (index === 2 && rpc.errors > 0) cell.className = "errors";
        row.append(cell);
      });
      return row;
    }),
  );
}

function drawWorker(worker, history) {
  const section = card(worker.address);
  section.className = `worker ${worker.state}`;
  const since = worker.seen_at_s ? `, last seen ${duration(Date.now() / 1000 - worker.seen_at_s)} ago` : "";
  const reachable = worker.state !== "unreachable";
  section.querySelector(".state").textContent = reachable ? worker.state : `unreachable${since}`;
  const segments = worker.sessions.reduce((sum, session) => sum + session.segments, 0);
  const drift = Math.max(0, ...worker.sessions.map((session) => session.drift));
  section.querySelector(".facts").textContent = reachable
    ? `${worker.device}, version ${worker.version}, up ${duration(worker.uptime_s)}. ` +
      `${worker.sessions.length} sessions, ${segments} segments held, ${worker.recomputed_segments} recomputed. ` +
      `Received ${bytes(worker.received_bytes)}, sent ${bytes(worker.sent_bytes)}.` +
      (drift > 0 ? ` Its numbers drift from a trainer's by ${drift.toExponential(1)}.` : "")
    : worker.error;
  const memory = worker.memory;
  const used = TIERS.reduce((sum, tier) => sum + memory[FIELDS[tier]], 0);
  section.querySelector(".now").textContent =
    `${bytes(used)} of ${bytes(memory.budget_bytes)} budget, process ${bytes(memory.resident_bytes)}`;
  drawMemory(section.querySelector(".chart"), history);
  drawLatency(section.querySelector("tbody"), worker.rpcs);
}

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

async function refresh() {
  const status = document.getElementById("status");
  try {
    const [workers, memory] = await Promise.all([ask("/api/v1/workers"), ask(`/api/v1/memory?samples=${SECONDS}`)]);
    workers.forEach((worker, index) => drawWorker(worker, memory[index]));
    answeredAt = Date.now();
    const serving = workers.filter((worker) => worker.state === "serving").length;
    status.textContent = `${serving} of ${workers.length} workers serving`;
    status.classList.remove("stale");
  } catch {
    const age = answeredAt ? `, numbers are ${duration((Date.now() - answeredAt) / 1000)} old` : "";
    status.textContent = `the dashboard does not answer${age}`;
    status.classList.add("stale");
  }
  setTimeout(refresh, 1000);
}

refresh();
