// Colours of style.css for canvases, which can't read variables themselves.

const probe = document.createElement("span");
const known = new Map();

const drawings = [];

document.addEventListener("themechange", () => {
  known.clear();
  // One after the other, so that the page itself turns at once and stays answering.
  const rest = [...drawings];
  const next = () => {
    rest.shift()?.();
    if (rest.length > 0) setTimeout(next);
  };
  requestAnimationFrame(() => setTimeout(next));
});

/** Calls `draw` again whenever colours have changed. */
export function drawInTheme(draw) {
  drawings.push(draw);
}

/** The present value of a variable of style.css, as rgb(). */
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

/** The same, see-through. */
export function translucent(name, alpha) {
  return colour(name).replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`);
}

/** What each phase of a segment is drawn in, alike on the whole page. */
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

/** Of runs that are compared; dashes say the same without colour. */
export const RUN_COLOURS = ["blue", "orange", "green", "purple", "vermilion", "slate"];
export const RUN_DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3], [12, 4], [4, 6]];
