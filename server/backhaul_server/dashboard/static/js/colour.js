// The colours of style.css for canvases, which cannot read CSS variables.

const probe = document.createElement("span");
const known = new Map();

const drawings = [];

document.addEventListener("themechange", () => {
  known.clear();
  // One canvas per task, so that the rest of the page changes at once and stays responsive.
  const rest = [...drawings];
  const next = () => {
    rest.shift()?.();
    if (rest.length > 0) setTimeout(next);
  };
  requestAnimationFrame(() => setTimeout(next));
});

/** Draws all canvases in the present colours before it returns, as a print needs. */
export function drawAllNow() {
  known.clear();
  for (const draw of drawings) draw();
}

/** Calls `draw` after each change of colours. */
export function drawInTheme(draw) {
  drawings.push(draw);
}

/** Returns the current value of a variable of style.css, as rgb(). */
export function colour(name) {
  if (!known.has(name)) {
    if (!probe.isConnected) {
      probe.hidden = true;
      document.body.append(probe);
    }
    probe.style.color = `var(--${name})`;
    known.set(name, getComputedStyle(probe).color);
  }
  return known.get(name);
}

/** Returns the same colour with transparency. */
export function translucent(name, alpha) {
  return colour(name).replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`);
}

/** The colour of each phase of a segment, the same on the whole page. */
export const LANE_COLOURS = {
  forward: "blue",
  upload: "sky",
  queue: "yellow",
  recompute: "orange",
  backward: "green",
  download: "purple",
  wait: "vermilion",
  trainer: "slate",
};

/** The colours of compared runs. Dashes distinguish the runs without colour. */
export const RUN_COLOURS = ["blue", "orange", "green", "purple", "vermilion", "slate"];
export const RUN_DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3], [12, 4], [4, 6]];
