// Builds SVG elements, and draws them onto a canvas. The page's policy forbids images from memory, so a drawing cannot
// become an image by itself.

const SVG = "http://www.w3.org/2000/svg";

/** Returns a new SVG element with these attributes and children, which are nodes or text. */
export function svgElement(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** Draws the paths, circles, rectangles and texts of a drawing with its upper left corner at a position of a canvas. */
export function drawSvg(context, svg, left, top) {
  const base = context.getTransform();
  for (const node of svg.querySelectorAll("path, circle, rect, text")) {
    const style = getComputedStyle(node);
    if (style.visibility === "hidden" || style.display === "none") continue;
    const matrix = node.getCTM();
    context.setTransform(base.translate(left, top).multiply(matrix));
    context.globalAlpha = opacityOf(node, svg);
    if (node.nodeName === "text") drawText(context, node, style);
    else drawShape(context, pathOf(node), style);
  }
  context.globalAlpha = 1;
  context.setTransform(base);
}

/** Returns the product of the opacities of a node and of the groups that it is in. */
function opacityOf(node, svg) {
  let opacity = 1;
  for (let at = node; at !== svg && at !== null; at = at.parentNode) opacity *= Number(getComputedStyle(at).opacity);
  return opacity;
}

function pathOf(node) {
  const number = (name) => Number(node.getAttribute(name) ?? 0);
  if (node.nodeName === "path") return new Path2D(node.getAttribute("d"));
  const path = new Path2D();
  if (node.nodeName === "circle") path.arc(number("cx"), number("cy"), number("r"), 0, 2 * Math.PI);
  else path.roundRect(number("x"), number("y"), number("width"), number("height"), number("rx"));
  return path;
}

function drawShape(context, path, style) {
  if (style.fill !== "none") {
    context.fillStyle = style.fill;
    context.fill(path);
  }
  if (style.stroke === "none") return;
  context.strokeStyle = style.stroke;
  context.lineWidth = Number.parseFloat(style.strokeWidth);
  context.setLineDash(style.strokeDasharray === "none" ? [] : style.strokeDasharray.split(/[ ,]+/).map(Number.parseFloat));
  context.stroke(path);
  context.setLineDash([]);
}

const ALIGNMENTS = { start: "left", middle: "center", end: "right" };

function drawText(context, node, style) {
  context.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  context.fillStyle = style.fill;
  context.textAlign = ALIGNMENTS[style.textAnchor];
  context.textBaseline = "middle";
  context.fillText(node.textContent, Number(node.getAttribute("x") ?? 0), Number(node.getAttribute("y") ?? 0));
  context.textAlign = "left";
}
