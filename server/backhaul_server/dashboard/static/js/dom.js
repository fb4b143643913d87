// Small means to build the page and to change it in place. Text from the network enters as text nodes only.

const SVG = "http://www.w3.org/2000/svg";

export function byId(id) {
  return document.getElementById(id);
}

/** Attributes by name, then children: nodes, or text. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  svg.append(document.createElementNS(SVG, "use"));
  setIcon(svg, name);
  return svg;
}

export function setIcon(svg, name) {
  const use = svg.querySelector("use");
  const target = `#icon-${name}`;
  if (use.getAttribute("href") !== target) use.setAttribute("href", target);
}

/** Touches the page only where the text is another one. */
export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

/** Sets an attribute, or takes it away where the value is null. */
export function setAttribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/** The sentence of a part that has nothing to show, hidden where it is "". */
export function explain(paragraph, sentence) {
  setText(paragraph, sentence);
  paragraph.hidden = sentence === "";
}

/**
 * Gives a select these options, `[value, text]`, or `{label, options}` for a group. What was chosen stays chosen while
 * it exists. Returns the value that is chosen.
 */
export function setOptions(select, options) {
  const signature = JSON.stringify(options);
  if (select.dataset.options === signature) return select.value;
  const chosen = select.value;
  const option = ([value, text]) => element("option", { value }, text);
  select.replaceChildren(
    ...options.map((entry) =>
      Array.isArray(entry) ? option(entry) : element("optgroup", { label: entry.label }, ...entry.options.map(option)),
    ),
  );
  select.dataset.options = signature;
  if ([...select.options].some((known) => known.value === chosen)) select.value = chosen;
  return select.value;
}

/** Says something to people who hear the page. */
export function speak(text) {
  setText(byId("spoken"), text);
}
