// The banner above every view: what needs a person, with the reason and the advice that the daemon gives.

import { h, setAttribute, setText } from "./dom.js";
import { ago } from "./format.js";
import { dismiss, needs } from "./health.js";

/** Lines that are shown before the rest is folded. */
const SHOWN = 4;

const root = document.getElementById("attention");
const list = h("ul");
const more = h("button", { type: "button", class: "plain" });
root.append(list, more);
const lines = new Map();
let isOpen = false;

function line(key) {
  const [link, word, text, advice, since] = [
    h("a"),
    h("span"),
    h("span"),
    h("span", { class: "advice" }),
    h("span", { class: "dim" }),
  ];
  const close = h("button", { type: "button", "aria-label": "Dismiss", title: "Dismiss in this browser" }, "×");
  const element = h(
    "li",
    {},
    h("p", { class: "what" }, link, " ", word),
    h("p", { class: "text" }, text, " ", advice),
    h("span", { class: "bar" }, since, close),
  );
  const made = { element, link, word, text, advice, since, close, need: null };
  close.addEventListener("click", () => {
    dismiss(made.need.task);
    draw();
  });
  lines.set(key, made);
  return made;
}

function fill(made, need) {
  made.need = need;
  setAttribute(made.element, "data-level", need.level);
  setAttribute(made.link, "href", need.href);
  setText(made.link, need.title);
  setText(made.word, need.word);
  setText(made.text, need.text);
  setText(made.advice, need.advice && `→ ${need.advice}`);
  setText(made.since, need.since ? ago(need.since) : "");
  made.close.hidden = !need.task;
}

/** Draws the banner; returns how many lines it has. */
export function draw() {
  const all = needs();
  const shown = isOpen ? all : all.slice(0, SHOWN);
  const wanted = shown.map((need) => {
    const made = lines.get(need.key) ?? line(need.key);
    fill(made, need);
    return made.element;
  });
  const isSame = wanted.length === list.children.length && wanted.every((element, at) => list.children[at] === element);
  if (!isSame) list.replaceChildren(...wanted);
  const keys = new Set(all.map((need) => need.key));
  for (const key of lines.keys()) if (!keys.has(key)) lines.delete(key);
  root.hidden = !all.length;
  more.hidden = all.length <= SHOWN;
  setText(more, isOpen ? "Show fewer" : `Show ${all.length - SHOWN} more`);
  return all.length;
}

more.addEventListener("click", () => {
  isOpen = !isOpen;
  draw();
});
