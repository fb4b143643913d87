// Pages of long tables: of lists that the API pages by cursors, and of lists that the page has as a whole.

import { element, setText } from "./dom.js";
import { count } from "./format.js";

/** The line below a table: which rows it shows of how many, and buttons for the neighbouring pages. */
class Pager {
  /**
   * @param {Table} table above the line
   * @param {string} items what the rows are, in the plural
   * @param {number} size rows of a page
   * @param {() => void} onTurn called after the viewer has turned the page
   */
  constructor(table, items, size, onTurn) {
    this.items = items;
    this.size = size;
    this.text = element("p", { role: "status" });
    this.previous = element("button", { type: "button" }, "Previous");
    this.next = element("button", { type: "button" }, "Next");
    const buttons = element("div", { class: "group", role: "group", "aria-label": `Pages of ${items}` }, this.previous, this.next);
    this.host = element("div", { class: "pager", id: `${items}-pager`, hidden: "" }, this.text, buttons);
    table.note.after(this.host);
    for (const [button, pages] of [[this.previous, -1], [this.next, 1]]) {
      button.addEventListener("click", () => {
        this.move(pages);
        table.scroll.scrollTop = 0;
        onTurn();
      });
    }
  }

  write(first, shown, total) {
    setText(this.text, total === 0 ? "" : `${count(first + 1)}–${count(first + shown)} of ${count(total)} ${this.items}`);
    this.previous.disabled = first === 0;
    this.next.disabled = first + shown >= total;
    this.host.hidden = total <= this.size && first === 0;
  }
}

/** Pages of a list that the API returns with `items`, `total` and the cursor of the next page. */
export class CursorPages extends Pager {
  cursors = [""]; // of each page up to the shown one
  following = null;

  move(pages) {
    if (pages < 0) this.cursors.pop();
    else if (this.following !== null) this.cursors.push(this.following);
  }

  reset() {
    this.cursors = [""];
  }

  get query() {
    return { limit: this.size, cursor: this.cursors.at(-1) };
  }

  show(answer) {
    this.following = answer.next;
    this.write((this.cursors.length - 1) * this.size, answer.items.length, answer.total);
    this.next.disabled = answer.next === null;
  }
}

/** Pages of a list that the page has as a whole, such as the workers of a live event. */
export class LocalPages extends Pager {
  page = 0;

  move(pages) {
    this.page += pages;
  }

  /** Returns the items of the present page, and shows which they are. */
  of(items) {
    this.page = Math.max(0, Math.min(this.page, Math.ceil(items.length / this.size) - 1));
    const first = this.page * this.size;
    const shown = items.slice(first, first + this.size);
    this.write(first, shown.length, items.length);
    return shown;
  }

  /** Turns to the page that has the item of this index. */
  turnTo(index) {
    this.page = Math.floor(index / this.size);
  }
}

/** Pages of a list of which the API returns `rows` from an offset on, and the `total`. */
export class OffsetPages extends LocalPages {
  get query() {
    return { limit: this.size, offset: this.page * this.size };
  }

  show(answer) {
    this.write(answer.offset, answer.rows.length, answer.total);
    this.host.hidden = answer.total === 0; // also one page says how many rows match
  }
}
