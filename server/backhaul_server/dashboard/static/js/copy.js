// A button at each figure that copies it as an image, with its title, legend and time range; where the clipboard is
// refused, as it is without TLS, the image is downloaded.

import { colour } from "./colour.js";
import { element, icon, setText, speak } from "./dom.js";
import { rangeTimes } from "./range.js";
import { drawSvg } from "./svg.js";

const PAD = 16;
const LINE = 20;
const SHOWN_MS = 2000;
const FAMILY = "Inter, system-ui, sans-serif";

/** Adds the button to a figure that has a figcaption and a chart in `.plot`. */
export function addCopyButton(figure) {
  const title = () => figure.querySelector("figcaption").textContent;
  const text = element("span", { class: "copy-text" });
  const button = element("button", { type: "button", class: "copy quiet", title: "Copy as an image" }, icon("copy"), text);
  button.setAttribute("aria-label", `Copy as an image: ${title()}`);
  button.addEventListener("click", async () => {
    const outcome = await deliver(await pictureOf(figure), `backhaul-${title()}`);
    setText(text, outcome);
    speak(`${title()}: ${outcome}`);
    setTimeout(() => setText(text, ""), SHOWN_MS);
  });
  figure.append(button);
}

/** Copies an image, or downloads it under a name. Returns what was done, in a word. */
async function deliver(canvas, name) {
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  try {
    await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
    return "Copied";
  } catch {
    const link = element("a", { download: `${name.replace(/[^\w]+/g, "-").slice(0, 80)}.png`, href: URL.createObjectURL(blob) });
    link.click();
    URL.revokeObjectURL(link.href);
    return "Downloaded";
  }
}

/** Returns a canvas with the figure: title, time range, legend and chart. */
async function pictureOf(figure) {
  await document.fonts.ready;
  const plot = figure.querySelector(".plot");
  const size = { width: plot.scrollWidth, height: plot.scrollHeight };
  const legend = [...figure.querySelectorAll(".legend li")].filter((item) => !item.hidden && item.textContent.trim());
  const canvas = element("canvas");
  const scale = Math.max(1, devicePixelRatio); // as sharp as the chart on the page
  const context = canvas.getContext("2d");
  const rows = layOut(context, legend, size.width);
  const top = PAD + LINE + 4 + rows.length * LINE + (rows.length > 0 ? 8 : 0);
  canvas.width = (size.width + 2 * PAD) * scale;
  canvas.height = (top + size.height + PAD) * scale;
  context.scale(scale, scale);
  context.fillStyle = colour("card");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.textBaseline = "middle";
  drawTitle(context, figure, size.width);
  rows.forEach((row, i) => drawLegend(context, row, PAD + LINE + 4 + (i + 0.5) * LINE));
  drawPlot(context, plot, PAD, top);
  return canvas;
}

function drawTitle(context, figure, width) {
  context.font = `600 13px ${FAMILY}`;
  context.fillStyle = colour("ink");
  context.fillText(figure.querySelector("figcaption").textContent, PAD, PAD + LINE / 2);
  context.font = `12px ${FAMILY}`;
  context.fillStyle = colour("faint");
  context.textAlign = "right";
  context.fillText(figure.dataset.scope ?? rangeTimes(), PAD + width, PAD + LINE / 2);
  context.textAlign = "left";
}

/** Arranges the items of a legend in rows of this width: lists of [item, left]. */
function layOut(context, items, width) {
  context.font = `12px ${FAMILY}`;
  const rows = [];
  let x = Infinity;
  for (const item of items) {
    const needed = 22 + context.measureText(item.textContent).width + (item.querySelector("canvas") ? 104 : 6) + 14;
    if (x + needed > width + 14) {
      rows.push([]);
      x = 0;
    }
    rows.at(-1).push([item, PAD + x]);
    x += needed;
  }
  return rows;
}

function drawLegend(context, row, y) {
  context.font = `12px ${FAMILY}`;
  for (const [item, left] of row) {
    let x = left;
    for (const node of item.childNodes) {
      if (node.nodeName === "CANVAS") {
        context.drawImage(node, x, y - 5);
        x += node.width + 6;
      } else if (node.classList?.contains("swatch") && !node.textContent) {
        x = drawSwatch(context, node, x, y);
      } else if (node.textContent.trim()) {
        context.fillStyle = node.nodeType === Node.ELEMENT_NODE ? getComputedStyle(node).color : colour("faint");
        context.fillText(node.textContent.trim(), x, y);
        x += context.measureText(node.textContent.trim()).width + 6;
      }
    }
  }
}

function drawSwatch(context, swatch, x, y) {
  const style = getComputedStyle(swatch);
  if (!swatch.classList.contains("line")) {
    context.fillStyle = style.backgroundColor;
    context.fillRect(x, y - 5, 10, 10);
    return x + 16;
  }
  context.strokeStyle = style.borderTopColor;
  context.lineWidth = 2;
  context.setLineDash(swatch.classList.contains("dashed") ? [5, 3] : swatch.classList.contains("dotted") ? [2, 2] : []);
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x + 16, y);
  context.stroke();
  context.setLineDash([]);
  return x + 22;
}

/** Draws the canvases, drawings and marks of a plot where they are on the page. */
function drawPlot(context, plot, left, top) {
  const origin = plot.getBoundingClientRect();
  for (const canvas of plot.querySelectorAll("canvas")) {
    const box = canvas.getBoundingClientRect();
    if (box.width > 0) context.drawImage(canvas, left + box.x - origin.x, top + box.y - origin.y, box.width, box.height);
  }
  for (const svg of plot.querySelectorAll("svg.diagram")) drawSvg(context, svg, left, top);
  for (const mark of plot.querySelectorAll(".event-mark")) {
    const box = mark.getBoundingClientRect();
    const x = left + box.x + box.width / 2 - origin.x;
    const y = top + box.y - origin.y;
    context.fillStyle = context.strokeStyle = getComputedStyle(mark).color;
    context.lineWidth = 1;
    context.setLineDash([3, 3]);
    context.beginPath();
    context.moveTo(x, y + 12);
    context.lineTo(x, y + box.height);
    context.stroke();
    context.setLineDash([]);
    context.font = `11px ${FAMILY}`;
    context.textAlign = "center";
    context.fillText(mark.textContent, x, y + 6);
    context.textAlign = "left";
  }
}
