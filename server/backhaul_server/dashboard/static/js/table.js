// Tables that keep their rows from one answer to the next, so that focus, selection and open details survive.

import { change, state } from "./address.js";
import { element, explain, icon, setAttribute, show } from "./dom.js";
import { count, NONE } from "./format.js";

/**
 * A column: `title` is its heading; `cell(item)` returns its text, a node, or a list of both; `isText` aligns it left;
 * `className` is the class of its cells; `hasErrors(item)` marks a cell; `sort` names the field to sort by; `hint` explains
 * the heading.
 */
export class Table {
  /**
   * @param {HTMLTableElement} table which scrolls in a region named by its `data-label`, and below which a sentence takes its
   *   place while it is empty
   * @param {object[]} columns objects as described above
   * @param {(item: object) => string} key returns a unique key of an item
   * @param {{details?: (item: object) => Node[], level?: (item: object) => string | null, sortedBy?: [string, string],
   *   onPick?: (key: string) => void}} options `sortedBy` names the parameters of the address for the field and the order
   */
  constructor(table, columns, key, options = {}) {
    this.table = table;
    this.note = element("p", { class: "empty", hidden: "" });
    this.scroll = element("div", { class: `scroll ${"tall" in table.dataset ? "tall" : ""}`, tabindex: "0", role: "region", "aria-label": table.dataset.label });
    table.replaceWith(this.scroll, this.note);
    this.scroll.append(table);
    this.body = table.createTBody();
    this.columns = columns;
    this.key = key;
    this.options = options;
    this.rows = new Map();
    this.open = new Set();
    this.heads = columns.map((column) => this.#head(column));
    table.createTHead().append(element("tr", {}, ...this.heads));
    moveWithArrows(this.body);
  }

  #head(column) {
    const head = element("th", { scope: "col", title: column.hint });
    if (column.isText) head.classList.add("text");
    if (column.className) head.classList.add(...column.className.split(" "));
    if (column.sort) {
      const [field, order] = this.options.sortedBy;
      const button = element("button", { type: "button" }, column.title);
      button.addEventListener("click", () => change({ [field]: column.sort, [order]: state(field) === column.sort && state(order) === "" ? "down" : "" }));
      head.append(button);
    } else {
      head.append(column.title);
    }
    return head;
  }

  /** Marks the field and the direction by which the rows are sorted. */
  showSort() {
    const [field, order] = this.options.sortedBy.map(state);
    this.columns.forEach((column, i) => {
      setAttribute(this.heads[i], "aria-sort", column.sort === field ? (order === "down" ? "descending" : "ascending") : null);
    });
  }

  /** Marks the row of a key as the picked one, or none. */
  showPicked(key) {
    this.picked = key;
    for (const [one, { row }] of this.rows) setAttribute(row, "aria-selected", one === key);
  }

  /** Shows these items in this order; if there are none, a sentence that says why and what to do. */
  update(items, sentence = "") {
    this.table.hidden = items.length === 0;
    explain(this.note, items.length === 0 ? sentence : "");
    const seen = new Set();
    let next = this.body.firstChild;
    for (const item of items) {
      const key = this.key(item);
      seen.add(key);
      let row = this.rows.get(key);
      if (row === undefined) {
        row = this.#row(key);
        this.rows.set(key, row);
      }
      this.#fill(row, item);
      for (const part of row.more.parentNode || this.open.has(key) ? [row.row, row.more] : [row.row]) {
        if (part === next) next = next.nextSibling;
        else this.body.insertBefore(part, next);
      }
    }
    for (const [key, row] of this.rows) {
      if (seen.has(key)) continue;
      row.row.remove();
      row.more.remove();
      this.rows.delete(key);
    }
  }

  /** Unfolds the row of a key, scrolls to it and moves the focus there. The row must be shown. */
  reveal(key) {
    const made = this.rows.get(key);
    if (made === undefined) return;
    if (made.expander && !this.open.has(key)) this.#toggle(key, made);
    made.row.scrollIntoView({ block: "center" });
    (made.expander ?? made.row).focus({ preventScroll: true });
  }

  #row(key) {
    const cells = this.columns.map((column) => {
      const classes = [column.isText ? "text" : "", column.className ?? ""].join(" ").trim();
      return element("td", classes ? { class: classes } : {});
    });
    const made = { row: element("tr", {}, ...cells), more: element("tr", { class: "more" }), cells, item: null };
    if (this.options.details) {
      made.more.append(element("td", { colspan: this.columns.length }));
      const text = element("span");
      made.expander = element("button", { type: "button", class: "expander", "aria-expanded": "false" }, icon("chevron"), text);
      made.expander.addEventListener("click", () => this.#toggle(key, made));
      made.cells[this.options.expands ?? 0].append(made.expander);
      made.label = text;
    }
    if (this.options.onPick) {
      setAttribute(made.row, "tabindex", "0");
      setAttribute(made.row, "aria-selected", key === this.picked);
      made.row.addEventListener("click", () => this.options.onPick(key));
      made.row.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        this.options.onPick(key);
      });
    }
    return made;
  }

  #toggle(key, made) {
    if (this.open.delete(key)) {
      made.more.remove();
    } else {
      this.open.add(key);
      made.more.firstChild.replaceChildren(...this.options.details(made.item));
      made.row.after(made.more);
    }
    made.expander.setAttribute("aria-expanded", this.open.has(key));
  }

  #fill(made, item) {
    made.item = item;
    this.columns.forEach((column, i) => {
      const target = made.label && i === (this.options.expands ?? 0) ? made.label : made.cells[i];
      show(target, column.cell(item));
      if (column.hasErrors) target.classList.toggle("errors", column.hasErrors(item));
    });
    if (this.options.level) setAttribute(made.row, "data-level", this.options.level(item));
    const key = this.key(item);
    if (this.open.has(key)) {
      const facts = this.options.details(item);
      const cell = made.more.firstChild;
      if (facts.map((fact) => fact.textContent).join() !== cell.textContent) cell.replaceChildren(...facts);
      made.expander.setAttribute("aria-expanded", "true");
    }
  }
}

/** Moves the focus up or down between rows, or between the same buttons or boxes of neighbouring rows. */
function moveWithArrows(body) {
  body.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    const selector = event.target.tagName === "TR" ? "tr[tabindex]" : `td > ${event.target.tagName.toLowerCase()}`;
    const stops = [...body.querySelectorAll(selector)];
    const next = stops[stops.indexOf(event.target) + (event.key === "ArrowDown" ? 1 : -1)];
    if (next === undefined) return;
    event.preventDefault();
    next.focus();
  });
}

/** Returns a column that shows a count, and marks it if it is not 0. */
export function problems(title, field, more = {}) {
  return { title, cell: (item) => count(item[field]), hasErrors: (item) => item[field] > 0, ...more };
}

/** Returns a smaller line of a cell; "" for no text. */
export function sub(text, className = "") {
  return text ? element("span", { class: `sub ${className}`.trim() }, text) : "";
}

/** Returns a name as a button that has the page show what is named; a dash for "". */
export function linkTo(value, text, title, go) {
  if (!value) return NONE;
  const button = element("button", { type: "button", class: "link", title, "data-value": value }, text);
  button.addEventListener("click", () => go(value));
  return button;
}

/** Returns names and values as a list that wraps. */
export function facts(entries) {
  return element(
    "dl",
    { class: "facts" },
    ...Object.entries(entries).map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))),
  );
}

/** The icon and the level of each state. */
export const STATES = {
  serving: ["ok", "good"],
  running: ["ok", "good"],
  draining: ["warning", "warn"],
  silent: ["warning", "warn"],
  lost: ["critical", "bad"],
  unreachable: ["critical", "bad"],
  ended: ["idle", "idle"],
  unwatched: ["idle", "idle"],
  active: ["ok", "good"],
  idle: ["idle", "idle"],
  broken: ["critical", "bad"],
};

/** Returns a state as shape, word and colour. */
export function stateOf(state) {
  const [name, level] = STATES[state];
  return element("span", { class: "state", "data-state": state, "data-level": level }, icon(name), state);
}

/** Returns a share as a bar and in words; its colour warns of a share near 1, as of a budget that is nearly used up. */
export function meter(share, text, { warns = true } = {}) {
  const fill = element("span", { class: "meter-fill" });
  fill.style.transform = `scaleX(${Math.min(1, Math.max(0, share)).toFixed(3)})`;
  const level = !warns || share <= 0.8 ? undefined : share > 0.95 ? "bad" : "warn";
  return element("span", { class: "meter", "data-level": level }, element("span", { class: "meter-track", "aria-hidden": "true" }, fill), element("span", {}, text));
}
