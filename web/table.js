// A table of any length. Only visible rows exist in the document, only changed cells are written, and the columns get
// widths that fit their texts: where there is too little room, columns of low importance are left out.

import { h, setAttribute, setText } from "./dom.js";

/** The height of a row in pixels, as in style.css. */
const ROW = 30;
const BEYOND = 6;
/** The padding of a cell, also on a narrow screen, and room for the mark of the sorted column. */
const PADDING = [18, 10];
const NARROW = matchMedia("(max-width: 700px)");
const SORT_MARK = 14;
/** The most that a text adds to the width of its column, and the least that a growing column is squeezed to. */
const WIDEST = 420;
const NARROWEST = 96;
/** Columns are left out before a growing one gets less than this, in a wide table and in a narrow one. */
const LEGIBLE = [320, 150];
const WIDE = 560;
const MEASURED_MAX = 4000;

const pen = document.createElement("canvas").getContext("2d");
const measured = new Map();

/** The width of a text in the table's bold font, in pixels. */
function widthOf(text) {
  let width = measured.get(text);
  if (width === undefined) {
    if (measured.size > MEASURED_MAX) measured.clear();
    const style = getComputedStyle(document.body);
    pen.font = `600 ${style.fontSize} ${style.fontFamily}`;
    width = Math.ceil(pen.measureText(text).width);
    measured.set(text, width);
  }
  return width;
}

/**
 * `columns`: `{ title, text(row), num, rank, grow, width, level(row), sort(row) }`. Columns with the highest `rank` are
 * left out first, those without one never; `grow` may be cut off; `width` is that of elements; `level` colours the text.
 * Rows have a `key`, and may have a `className`. `onOpen(row)` is called for a click or Enter; rows with a higher
 * `pin(row)` come first, however the table is sorted.
 */
export class Table {
  constructor(label, columns, { onOpen, sortBy, isUp = false, pin, empty = "Nothing" } = {}) {
    Object.assign(this, { columns, onOpen, pin, rows: [], pool: [], active: null, order: null });
    this.sort = sortBy === undefined ? null : { column: columns[sortBy], down: !isUp };
    this.natural = columns.map((column) => column.width ?? widthOf(column.title) + (column.sort ? SORT_MARK : 0));
    this.isFitted = false;
    this.heads = columns.map((column) => this.head(column));
    this.above = h("tr", { class: "spacer", "aria-hidden": "true" }, h("td"));
    this.below = this.above.cloneNode(true);
    this.body = h("tbody", {}, this.above, this.below);
    const head = h("thead", {}, h("tr", { "aria-rowindex": 1 }, this.heads));
    this.table = h("table", { "aria-label": label }, head, this.body);
    this.none = h("p", { class: "empty dim" }, empty);
    this.element = h(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
      this.table,
      this.none,
    );
    this.element.addEventListener("scroll", () => this.draw(), { passive: true });
    this.element.addEventListener("keydown", (event) => this.key(event));
    // Rows that move away under the pointer would be clicked by mistake.
    this.body.addEventListener("pointerenter", () => {
      this.held = true;
    });
    this.body.addEventListener("pointerleave", () => {
      this.held = false;
    });
    this.body.addEventListener("click", (event) => {
      const line = event.target.closest("tr[data-key]");
      if (line && !event.target.closest("button, a")) this.open(line.dataset.key);
    });
    new ResizeObserver(() => {
      this.isFitted = false;
      this.draw();
    }).observe(this.element);
  }

  head(column) {
    const attributes = { scope: "col", class: column.num ? "num" : null };
    if (!column.sort) return h("th", attributes, column.title);
    const onclick = () => {
      const down = this.sort?.column === column ? !this.sort.down : Boolean(column.num);
      this.sort = { column, down };
      this.set(this.given, true);
    };
    column.head = h("th", attributes, h("button", { type: "button", onclick }, column.title));
    return column.head;
  }

  /** Shows these rows; their order stays while the pointer is on them. */
  set(rows, again = false) {
    this.given = rows;
    if (this.sort) {
      for (const each of this.columns.filter((one) => one.head)) {
        const direction = this.sort.down ? "descending" : "ascending";
        setAttribute(each.head, "aria-sort", each === this.sort.column ? direction : null);
      }
      if (this.held && !again && this.order) {
        const last = this.order.size;
        rows = [...rows].sort((a, b) => (this.order.get(a.key) ?? last) - (this.order.get(b.key) ?? last));
      } else {
        rows = this.sorted(rows);
      }
      this.order = new Map(rows.map((row, index) => [row.key, index]));
    }
    this.rows = rows;
    setAttribute(this.table, "aria-rowcount", rows.length + 1);
    this.draw();
  }

  sorted(rows) {
    const { column, down } = this.sort;
    const pins = new Map(rows.map((row) => [row.key, this.pin?.(row) ?? 0]));
    return [...rows].sort((a, b) => {
      const pinned = pins.get(b.key) - pins.get(a.key);
      if (pinned) return pinned;
      const [x, y] = [column.sort(a), column.sort(b)];
      const order = x < y ? -1 : x > y ? 1 : a.key < b.key ? -1 : 1;
      return down ? -order : order;
    });
  }

  draw() {
    this.table.hidden = !this.rows.length;
    this.none.hidden = Boolean(this.rows.length);
    const height = this.element.clientHeight || 600;
    const count = Math.ceil(height / ROW) + 2 * BEYOND;
    // There may be fewer rows than when it was scrolled.
    const from = Math.min(Math.floor(this.element.scrollTop / ROW) - BEYOND, this.rows.length - count);
    const first = Math.max(0, from);
    const shown = this.rows.slice(first, first + count);
    while (this.pool.length < shown.length) this.grow();
    this.above.firstChild.style.height = `${first * ROW}px`;
    this.below.firstChild.style.height = `${Math.max(0, this.rows.length - first - shown.length) * ROW}px`;
    this.pool.forEach((line, index) => this.fill(line, shown[index], first + index));
    if (!this.isFitted) this.fit();
  }

  /** Gives the columns widths by their widest texts so far, and leaves out those for which there is no room. */
  fit() {
    const room = this.element.clientWidth;
    if (!room || !this.rows.length) return;
    this.isFitted = true;
    const widths = this.natural.map((width) => width + PADDING[NARROW.matches ? 1 : 0]);
    const isShown = this.columns.map(() => true);
    const legible = LEGIBLE[room >= WIDE ? 0 : 1];
    const sum = () => widths.reduce((total, width, at) => total + (isShown[at] ? width : 0), 0);
    for (const at of this.byRank()) {
      const squeezed = this.columns.reduce(
        (saved, column, index) => saved + (column.grow && isShown[index] ? Math.max(0, widths[index] - legible) : 0),
        0,
      );
      if (sum() - squeezed > room) isShown[at] = false;
    }
    this.squeeze(widths, isShown, sum() - room);
    const spare = Math.max(0, room - sum());
    const total = sum();
    this.columns.forEach((column, at) => {
      this.heads[at].hidden = !isShown[at];
      this.heads[at].style.width = `${Math.floor(widths[at] + (spare * widths[at]) / total)}px`;
      for (const { cells } of this.pool) cells[at].hidden = !isShown[at];
    });
    this.table.style.minWidth = total > room ? `${total}px` : "";
  }

  /** Narrows the widest growing columns until `over` pixels are saved, or none can be narrowed. */
  squeeze(widths, isShown, over) {
    while (over > 0) {
      const open = widths.filter((width, at) => this.columns[at].grow && isShown[at] && width > NARROWEST);
      if (!open.length) return;
      const widest = Math.max(...open);
      const next = Math.max(NARROWEST, ...open.filter((width) => width < widest));
      const count = open.filter((width) => width === widest).length;
      const step = Math.min(widest - next, over / count);
      widths.forEach((width, at) => {
        if (width === widest && this.columns[at].grow && isShown[at]) widths[at] -= step;
      });
      over -= step * count;
      if (step < 0.01) return;
    }
  }

  /** The columns that may be left out, the first to go first. */
  byRank() {
    const ranked = this.columns.map((column, at) => [column.rank ?? 0, at]).filter(([rank]) => rank > 0);
    return ranked.sort((a, b) => b[0] - a[0]).map(([, at]) => at);
  }

  grow() {
    const cells = this.columns.map((column, at) =>
      h("td", { hidden: this.heads[at].hidden, class: column.num ? "num" : column.grow ? "grow" : null }),
    );
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
    this.columns.forEach((column, at) => this.fillCell(cells[at], column, row, at));
  }

  fillCell(cell, column, row, at) {
    const value = column.text(row) ?? "";
    if (column.level) setAttribute(cell, "data-level", value === "" ? null : column.level(row));
    if (value instanceof Node) {
      if (cell.firstChild !== value) cell.replaceChildren(value);
      return;
    }
    const text = String(value);
    if (cell.textContent === text) return;
    setText(cell, text);
    setAttribute(cell, "title", column.grow && text ? text : null);
    const inset = (column.level ? SORT_MARK : 0) + (at === 0 && row.className?.includes("level1") ? 2 * SORT_MARK : 0);
    const width = Math.min(widthOf(text) + inset, WIDEST);
    if (width > this.natural[at]) {
      this.natural[at] = width;
      this.isFitted = false;
    }
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
    const next = {
      ArrowDown: at + 1,
      ArrowUp: at < 0 ? last : at - 1,
      PageDown: at + page,
      PageUp: at - page,
      Home: 0,
      End: last,
    }[event.key];
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
