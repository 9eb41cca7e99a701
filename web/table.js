// A table of any length: only the rows that can be seen exist, and only cells that have changed are written.

import { h, setAttribute, setText } from "./dom.js";

const ROW = 28;
const BEYOND = 6;

/**
 * `columns`: `{ title, text(row), num, wide, sort(row) }`; rows have a `key`, and may have a `className`.
 * `onOpen(row)` is called for a click or Enter.
 */
export class Table {
  constructor(label, columns, { onOpen, sortBy, empty = "Nothing" } = {}) {
    Object.assign(this, { columns, onOpen, empty, rows: [], pool: [], active: null, order: null });
    this.sort = sortBy === undefined ? null : { column: columns[sortBy], down: true };
    const heads = columns.map((column) => this.head(column));
    this.above = h("tr", { class: "spacer", "aria-hidden": "true" }, h("td"));
    this.below = this.above.cloneNode(true);
    this.body = h("tbody", {}, this.above, this.below);
    this.table = h("table", { "aria-label": label }, h("thead", {}, h("tr", { "aria-rowindex": 1 }, heads)), this.body);
    this.element = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, this.table);
    this.element.addEventListener("scroll", () => this.draw(), { passive: true });
    this.element.addEventListener("keydown", (event) => this.key(event));
    // Rows that move away under the pointer would be clicked by mistake.
    this.body.addEventListener("pointerenter", () => { this.held = true; });
    this.body.addEventListener("pointerleave", () => { this.held = false; });
    this.body.addEventListener("click", (event) => {
      const line = event.target.closest("tr[data-key]");
      if (line && !event.target.closest("button, a")) this.open(line.dataset.key);
    });
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  head(column) {
    const classes = [column.num && "num", column.wide && "wide"].filter(Boolean).join(" ");
    if (!column.sort) return h("th", { scope: "col", class: classes }, column.title);
    const onclick = () => {
      const down = this.sort?.column === column ? !this.sort.down : Boolean(column.num);
      this.sort = { column, down };
      this.set(this.given, true);
    };
    column.head = h("th", { scope: "col", class: classes }, h("button", { type: "button", onclick }, column.title));
    return column.head;
  }

  /** Shows these rows; their order stays while the pointer is on them. */
  set(rows, again = false) {
    this.given = rows;
    if (this.sort) {
      const { column, down } = this.sort;
      for (const each of this.columns.filter((one) => one.head)) {
        setAttribute(each.head, "aria-sort", each === column ? (down ? "descending" : "ascending") : null);
      }
      const compare = (a, b) => {
        const [x, y] = [column.sort(a), column.sort(b)];
        const order = x < y ? -1 : x > y ? 1 : a.key < b.key ? -1 : 1;
        return down ? -order : order;
      };
      if (this.held && !again && this.order) {
        const last = this.order.size;
        rows = [...rows].sort((a, b) => (this.order.get(a.key) ?? last) - (this.order.get(b.key) ?? last));
      } else {
        rows = [...rows].sort(compare);
      }
      this.order = new Map(rows.map((row, index) => [row.key, index]));
    }
    this.rows = rows;
    setAttribute(this.table, "aria-rowcount", rows.length + 1);
    this.draw();
  }

  draw() {
    const height = this.element.clientHeight || 600;
    const count = Math.ceil(height / ROW) + 2 * BEYOND;
    // There may be fewer rows than when it was scrolled.
    const from = Math.min(Math.floor(this.element.scrollTop / ROW) - BEYOND, this.rows.length - count);
    const first = Math.max(0, from);
    const shown = this.rows.slice(first, first + count);
    while (this.pool.length < Math.max(shown.length, 1)) this.grow();
    this.above.firstChild.style.height = `${first * ROW}px`;
    this.below.firstChild.style.height = `${Math.max(0, this.rows.length - first - shown.length) * ROW}px`;
    this.pool.forEach((line, index) => this.fill(line, shown[index], first + index));
    if (!this.rows.length) {
      this.pool[0].element.hidden = false;
      setText(this.pool[0].cells[0], this.empty);
    }
  }

  grow() {
    const cells = this.columns.map((column) =>
      h("td", { class: [column.num && "num", column.wide && "wide"].filter(Boolean).join(" ") }));
    const element = h("tr", { hidden: true }, cells);
    this.below.before(element);
    this.pool.push({ element, cells });
  }

  fill({ element, cells }, row, index) {
    if (element.hidden !== !row) element.hidden = !row;
    setAttribute(element, "data-key", row && this.onOpen && !row.inert ? row.key : null);
    if (!row) {
      for (const cell of cells) if (cell.firstChild) cell.replaceChildren();
      return;
    }
    setAttribute(element, "aria-rowindex", index + 2);
    const active = row.key === this.active;
    setAttribute(element, "class", `${row.className || ""}${active ? " active" : ""}`.trim() || null);
    setAttribute(element, "aria-current", active ? "true" : null);
    this.columns.forEach((column, at) => {
      const cell = cells[at];
      const value = column.text(row);
      if (value instanceof Node) {
        if (cell.firstChild !== value) cell.replaceChildren(value);
      } else {
        setText(cell, value ?? "");
        setAttribute(cell, "title", at === 0 ? value : null);
      }
    });
  }

  open(key) {
    const row = this.rows.find((one) => one.key === key);
    if (row && this.onOpen && !row.inert) this.onOpen(row);
  }

  key(event) {
    if (event.target !== this.element) return;
    const at = this.rows.findIndex((row) => row.key === this.active);
    const page = Math.max(1, Math.floor(this.element.clientHeight / ROW) - 1);
    const last = this.rows.length - 1;
    const next = { ArrowDown: at + 1, ArrowUp: at < 0 ? last : at - 1, PageDown: at + page, PageUp: at - page, Home: 0,
      End: last }[event.key];
    if (event.key === "Enter" && this.active) {
      this.open(this.active);
    } else if (next === undefined || last < 0) {
      return;
    } else {
      const index = Math.min(Math.max(next, 0), last);
      this.active = this.rows[index].key;
      const top = index * ROW;
      const room = this.element.clientHeight - 2 * ROW;
      if (top < this.element.scrollTop) this.element.scrollTop = top;
      else if (top > this.element.scrollTop + room) this.element.scrollTop = top - room;
      this.draw();
    }
    event.preventDefault();
  }
}
