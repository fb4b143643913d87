// Builds page elements and changes them in place. Text from the network becomes text nodes only, never markup.

const SVG = "http://www.w3.org/2000/svg";

export function byId(id) {
  return document.getElementById(id);
}

/** Returns a new element with these attributes and children, which are nodes or text. */
export function element(name, attributes, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** Returns a new SVG element in the same way. */
export function svgElement(name, attributes, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(made, attributes = {}, children = []) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export function icon(name) {
  const svg = svgElement("svg", { class: "icon", "aria-hidden": "true" }, svgElement("use"));
  setIcon(svg, name);
  return svg;
}

export function setIcon(svg, name) {
  const use = svg.querySelector("use");
  const target = `#icon-${name}`;
  if (use.getAttribute("href") !== target) use.setAttribute("href", target);
}

/** Sets the text of a node if it differs. */
export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

/**
 * Shows this content, nodes or text, in place of what a node has. Nodes that are there already are changed instead of
 * replaced. Only buttons and fields may have listeners, which may depend on nothing but what their node shows.
 */
export function show(host, ...content) {
  if (content.length === 1 && typeof content[0] === "string" && host.childElementCount === 0) {
    setText(host, content[0]); // most cells of tables: no node has to be made to find that nothing differs
    return;
  }
  const wanted = content.flat().filter((part) => part !== "").map((part) => (part instanceof Node ? part : new Text(part)));
  wanted.forEach((node, i) => {
    const there = host.childNodes[i];
    if (there === undefined) host.append(node);
    else if (!there.isEqualNode(node)) become(there, node);
  });
  while (host.childNodes.length > wanted.length) host.lastChild.remove();
}

/** Gives a node the attributes and the content of another one, which takes its place if that has listeners. */
function become(there, node) {
  if (there.nodeName !== node.nodeName || node.matches?.("button, input")) there.replaceWith(node);
  else if (node instanceof Text) there.data = node.data;
  else {
    for (const { name } of [...there.attributes]) if (!node.hasAttribute(name)) there.removeAttribute(name);
    for (const { name, value } of node.attributes) if (name !== "style") setAttribute(there, name, value);
    const { cssText } = node.style; // the page's policy forbids style attributes
    if (there.style.cssText !== cssText) there.style.cssText = cssText;
    show(there, ...node.childNodes);
  }
}

/** Sets an attribute, or removes it if the value is null. */
export function setAttribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/** Shows the sentence of a part that has nothing to show; hides it if the sentence is "". */
export function explain(paragraph, sentence) {
  setText(paragraph, sentence);
  paragraph.hidden = sentence === "";
}

/**
 * Sets the options of a select: `[value, text]`, or `{label, options}` for a group. Chooses the wanted one if it exists, or
 * else the first. Returns the value of the chosen option.
 */
export function setOptions(select, options, wanted) {
  const signature = JSON.stringify(options);
  const option = ([value, text]) => element("option", { value }, text);
  const made = (entry) => (Array.isArray(entry) ? option(entry) : element("optgroup", { label: entry.label }, ...entry.options.map(option)));
  if (select.dataset.options !== signature) select.replaceChildren(...options.map(made));
  select.dataset.options = signature;
  if (select.value !== wanted) select.value = wanted;
  if (select.selectedIndex < 0) select.selectedIndex = 0;
  return select.value;
}

/** Announces a text to screen readers. */
export function speak(text) {
  setText(byId("spoken"), text);
}
