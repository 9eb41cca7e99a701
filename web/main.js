// The page: which view is shown, the keyboard, the theme, the token, and the notice while the daemon does not answer.

import { token } from "./api.js";
import { draw as drawAttention } from "./attention.js";
import { dialog, h, setText } from "./dom.js";
import { staleFor, start, state, stop, subscribe } from "./store.js";
import { disk } from "./view-disk.js";
import { schedules } from "./view-schedules.js";
import { tokens } from "./view-tokens.js";
import { machine } from "./view-vm.js";
import { machines } from "./view-vms.js";
import { allDisks, allTasks, overview, repositories, repository } from "./views.js";

const main = document.getElementById("main");
const filter = document.getElementById("filter");
const stale = document.getElementById("stale");
let view = null;

/** The views of lists, by their name in the address, and the digit that opens each. */
const VIEWS = { vms: machines, disks: allDisks, srs: repositories, schedules, tasks: allTasks, tokens };
const DIGITS = ["", ...Object.keys(VIEWS)];
/** The list to which an object's view belongs. */
const LIST_OF = { sr: "srs", vm: "vms", disk: "disks" };

function viewOf(hash) {
  const [, name, ...rest] = hash.split("/").map(decodeURIComponent);
  if (name === "sr" && rest[0]) return repository(rest[0]);
  if (name === "disk" && rest[0]) return disk(...rest);
  if (name === "vm" && rest[0]) return machine(rest[0]);
  return (VIEWS[name] ?? overview)();
}

function navigate() {
  view?.destroy?.();
  try {
    view = viewOf(location.hash || "#/");
  } catch {
    // An address with a broken escape.
    view = overview();
  }
  main.replaceChildren(view.element);
  const name = location.hash.split("/")[1] || "";
  const current = `#/${LIST_OF[name] ?? name}`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  window.scrollTo(0, 0);
  view.draw();
}

function drawStale() {
  const silence = staleFor();
  document.body.classList.toggle("stale", silence > 0);
  const problem = state.problem;
  // In steps of five seconds: each text is read out by a screen reader.
  const text = silence
    ? `The page is out of date: no answer for ${Math.max(4, Math.floor(silence / 5000) * 5)} s. ` +
      `${problem?.message ?? ""} It retries automatically.`
    : problem
      ? `${problem.message} ${problem.advice}`
      : "";
  stale.hidden = !text;
  setText(stale, text);
}

let asking = false;
async function askToken(problem) {
  if (asking) return;
  asking = true;
  const hadToken = Boolean(token.get());
  token.set("");
  const input = h("input", { type: "password", name: "token", autocomplete: "off", required: true, autofocus: true });
  const content = h(
    "div",
    {},
    h("p", { class: hadToken ? "bad" : "" }, hadToken ? problem.message : "Over the network the daemon needs a token."),
    h(
      "p",
      {},
      "On its host, root creates one: ",
      h("code", {}, "tapline token create NAME"),
      ". It is kept for this tab, until the tab is closed.",
    ),
    h("label", {}, "Token", input),
  );
  const answer = await dialog("Token", content, [{ label: "Use it", value: "do", kind: "primary" }]);
  asking = false;
  // A header has visible ASCII only.
  const secret = input.value.trim();
  if (answer && /^[!-~]+$/.test(secret)) token.set(secret);
  start(askToken);
}

const THEMES = ["auto", "dark", "light"];
function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  localStorage.setItem("tapline-theme", theme);
  const button = document.getElementById("theme");
  setText(button, `Theme: ${theme}`);
  button.setAttribute("aria-label", `Theme: ${theme}. Press for the next one.`);
}
const theme = () => {
  const known = localStorage.getItem("tapline-theme");
  return THEMES.includes(known) ? known : "auto";
};

function help() {
  const keys = [
    ["/", "filter"],
    [`1 – ${DIGITS.length}`, "open a view, in the order of the links"],
    ["↓ ↑", "select a row"],
    ["Enter", "open the row"],
    ["t", "next theme"],
    ["Esc", "leave the filter, a dialog, or a view for the overview"],
    ["?", "this help"],
  ];
  const rows = keys.map(([key, what]) => h("tr", {}, h("td", {}, h("kbd", {}, key)), h("td", {}, what)));
  dialog("Keyboard", h("table", {}, h("tbody", {}, rows)), [{ label: "Close", value: "do" }]);
}

function keydown(event) {
  // What is typed at the screen of a VM is for its guest.
  if (event.target.closest(".screen")) return;
  if (event.ctrlKey || event.altKey || event.metaKey || document.querySelector("dialog[open]")) return;
  const inField = event.target.closest("input, select, textarea");
  if (event.key === "Escape") {
    if (inField && filter.value) {
      filter.value = "";
      view.draw();
    } else if (inField) {
      filter.blur();
    } else {
      location.hash = "#/";
    }
  } else if (inField === filter && ["Enter", "ArrowDown"].includes(event.key)) {
    view.table?.element.focus();
    view.table?.key(new KeyboardEventLike("ArrowDown", view.table.element));
  } else if (inField) {
    return;
  } else if (event.key === "/") {
    filter.focus();
  } else if (event.key === "?") {
    help();
  } else if (event.key === "t") {
    nextTheme();
  } else if (DIGITS[Number(event.key) - 1] !== undefined) {
    location.hash = `#/${DIGITS[Number(event.key) - 1]}`;
  } else if (["ArrowDown", "ArrowUp"].includes(event.key) && !event.target.closest(".scroll")) {
    view.table?.element.focus();
    view.table?.key(new KeyboardEventLike(event.key, view.table.element));
  } else {
    return;
  }
  event.preventDefault();
}

/** A key that is handed to a table. */
class KeyboardEventLike {
  constructor(key, target) {
    Object.assign(this, { key, target });
  }

  preventDefault() {}
}

setTheme(theme());
const nextTheme = () => setTheme(THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]);
document.getElementById("theme").addEventListener("click", nextTheme);
document.getElementById("help").addEventListener("click", help);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
filter.addEventListener("input", () => view.draw());
document.addEventListener("keydown", keydown);
document.addEventListener("visibilitychange", () => (document.hidden ? stop() : start(askToken)));
window.addEventListener("hashchange", navigate);
subscribe(() => {
  view.draw();
  document.body.classList.toggle("loaded", state.loaded);
  // The number of what needs a person is seen in the browser's tab.
  const troubles = drawAttention();
  document.title = `${troubles ? `(${troubles}) ` : ""}${state.host?.name ?? "Tapline"}${state.host ? " – Tapline" : ""}`;
});
setInterval(drawStale, 500);
navigate();
start(askToken);
