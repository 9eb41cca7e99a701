// Parts that several views have: tables of disks, repositories, tasks and changes, the bar of a repository's space.

import { cancelTask } from "./actions.js";
import { changes } from "./events.js";
import { dialog, facts, h, setAttribute, setText } from "./dom.js";
import { ago, bytes, duration, fullIn, megabytes, moment, number, percent, time } from "./format.js";
import {
  objectName,
  severity,
  spaceLevel,
  spaceWords,
  srLevel,
  srWord,
  taskWords,
  vbdLevel,
  vbdWord,
} from "./health.js";
import { isOpen, nameOf, state } from "./store.js";
import { Table } from "./table.js";

export const go = (hash) => {
  location.hash = hash;
};

/** Whether any of these words has the text of the filter. */
export function matches(...words) {
  const text = document.getElementById("filter").value.trim().toLowerCase();
  return !text || words.flat().some((word) => word && String(word).toLowerCase().includes(text));
}

export const section = (title, ...content) => h("section", { "aria-label": title }, h("h2", {}, title), content);

/** A section with buttons beside its title. */
export function sectionWith(title, buttons, ...content) {
  return h("section", { "aria-label": title }, h("div", { class: "head" }, h("h2", {}, title), buttons), content);
}

/** One object for each row, kept while the row is there: its elements are not made again. */
export class Kept {
  constructor(make) {
    this.make = make;
    this.all = new Map();
  }

  of(key) {
    if (!this.all.has(key)) this.all.set(key, this.make(key));
    return this.all.get(key);
  }
}

/** The name of a snapshot below its disk: without the disk's name, with which it usually begins. */
export const snapshotName = ({ name }, root) =>
  name.startsWith(`${root.name}@`) ? name.slice(root.name.length) : name;

export const openDisk = (row) => go(`#/disk/${row.now.vdi}/${row.now.vbd}`);
const vbdOf = (row) => state.vbd.get(row.now.vbd);

/** The average duration of the requests that were answered since the last reading. */
function latency(row) {
  if (!row.rate || !row.rate.iops) return null;
  return (row.rate.load / row.rate.iops) * 1e9;
}

/** A table of plugged disks by load; those that need a person come first. */
export function diskTable(label, empty) {
  const oldest = ({ now }) => (now.oldest_ns === undefined ? "" : duration(now.oldest_ns));
  const columns = [
    { title: "Disk", grow: true, text: (row) => nameOf(row.now), sort: (row) => nameOf(row.now) },
    {
      title: "State",
      text: (row) => vbdWord(vbdOf(row)),
      level: (row) => vbdLevel(vbdOf(row)),
      sort: (row) => severity(vbdOf(row)?.health),
    },
    { title: "IOPS", num: true, text: (row) => number(row.rate?.iops), sort: (row) => row.rate?.iops ?? 0 },
    {
      title: "MB/s",
      num: true,
      rank: 3,
      text: ({ rate }) => megabytes(rate?.bytes),
      sort: ({ rate }) => rate?.bytes ?? 0,
    },
    { title: "Queue", num: true, rank: 2, text: (row) => number(row.load), sort: (row) => row.load },
    { title: "Latency", num: true, rank: 1, text: (one) => duration(latency(one)), sort: (one) => latency(one) ?? 0 },
    { title: "Oldest", num: true, rank: 4, text: oldest, sort: (row) => row.now.oldest_ns ?? 0 },
    { title: "Repository", grow: true, rank: 5, text: (row) => row.now.sr_name, sort: (row) => row.now.sr_name },
  ];
  const pin = (row) => severity(vbdOf(row)?.health);
  return new Table(label, columns, { onOpen: openDisk, sortBy: 4, pin, empty });
}

/** The plugged disks that match the filter. */
export const shownDisks = () =>
  [...state.disks.values()].filter(({ now }) =>
    matches(nameOf(now), now.sr_name, now.vbd, now.vdi, vbdWord(state.vbd.get(now.vbd))),
  );

/** The space of a repository as a bar; the reserve is part of what is not free. */
export function spaceBar(label) {
  const [used, reserve] = [h("span", { class: "used" }), h("span", { class: "reserve" })];
  const element = h(
    "span",
    { class: "space", role: "meter", "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": label },
    used,
    reserve,
  );
  return {
    element,
    set(sr) {
      element.hidden = !sr.space;
      if (!sr.space) return;
      const { physical_size: size, physical_utilisation: taken } = sr.space;
      const part = size ? Math.min(1, taken / size) : 0;
      const kept = size ? Math.min(1 - part, (sr.reserve ?? 0) / size) : 0;
      setAttribute(element, "data-level", spaceLevel(sr));
      setAttribute(element, "aria-valuenow", Math.round(part * 100));
      setAttribute(element, "title", `${percent(part)} used: ${spaceWords(sr)}`);
      used.style.width = `${part * 100}%`;
      reserve.style.width = `${kept * 100}%`;
    },
  };
}

export function srTable() {
  const bars = new Kept((uuid) => spaceBar(`Space used in ${state.sr.get(uuid)?.name ?? "the repository"}`));
  const columns = [
    { title: "Name", grow: true, text: (sr) => sr.name, sort: (sr) => sr.name },
    { title: "State", text: srWord, level: srLevel, sort: srWord },
    {
      title: "Space",
      width: 64,
      text: (sr) => {
        const bar = bars.of(sr.key);
        bar.set(sr);
        return bar.element;
      },
    },
    {
      title: "Free",
      num: true,
      text: (sr) => (sr.space ? bytes(sr.space.free) : ""),
      sort: (sr) => sr.space?.free ?? 0,
    },
    {
      title: "Size",
      num: true,
      rank: 2,
      text: (sr) => (sr.space ? bytes(sr.space.physical_size) : ""),
      sort: (sr) => sr.space?.physical_size ?? 0,
    },
    { title: "Full", rank: 1, text: (sr) => (sr.space ? fullIn(sr.space) : "") },
    { title: "Storage", rank: 3, text: (sr) => (sr.variant ? `${sr.variant.filesystem} at ${sr.variant.path}` : "") },
  ];
  const onOpen = (sr) => go(`#/sr/${sr.key}`);
  const pin = (sr) => ({ bad: 2, warn: 1 })[srLevel(sr)] ?? 0;
  const table = new Table("Repositories", columns, { onOpen, sortBy: 0, isUp: true, pin, empty: "No repositories" });
  table.element.classList.add("short");
  return table;
}

export const srRows = () =>
  [...state.sr.values()]
    .filter((sr) => matches(sr.name, sr.uuid, sr.tags, srWord(sr)))
    .map((sr) => ({ ...sr, key: sr.uuid }));

const TASK_LEVELS = { done: "good", failed: "bad", stuck: "bad", cancelled: "idle" };

/** Tasks with their progress and a button that cancels them; `isLong` has columns for those that have ended. */
export function taskTable(isLong) {
  const parts = new Kept((uuid) => {
    const bar = h("progress", { max: 1, "aria-label": "Progress" });
    const text = h("span");
    const task = () => state.tasks.find((one) => one.uuid === uuid);
    const button = h("button", { type: "button", onclick: () => cancelTask(task()) }, "Cancel");
    return { bar, text, button, line: h("span", { class: "bar" }, bar, text, button) };
  });
  const progress = (task) => {
    if (!isOpen(task)) return task.ended ? `ended ${ago(task.ended)} ago` : "";
    const { bar, text, button, line } = parts.of(task.key);
    if (bar.value !== task.progress) bar.value = task.progress;
    setText(text, percent(task.progress));
    const can = task.cancellable && task.state !== "cancelling";
    if (button.disabled === can) button.disabled = !can;
    setAttribute(button, "aria-label", `Cancel ${taskWords(task)}`);
    return line;
  };
  const columns = [
    { title: "Task", grow: true, text: taskWords },
    {
      title: "State",
      text: (task) => task.state,
      level: (task) => TASK_LEVELS[task.state] ?? (task.problem ? "warn" : "idle"),
    },
    { title: "Progress", width: 150, text: progress },
    ...(isLong
      ? [
          { title: "Begun", rank: 3, text: (task) => moment(task.created) },
          { title: "By", rank: 4, text: (task) => requesterName(task.requester) },
          { title: "Problem", grow: true, rank: 1, text: (task) => task.problem?.detail ?? "" },
        ]
      : []),
  ];
  const onOpen = (task) => showTask(task);
  return new Table("Tasks", columns, { onOpen, empty: isLong ? "No tasks" : "No task is running" });
}

/** Shows all of a task. */
async function showTask(task) {
  const about = facts();
  about.set({
    State: task.state,
    Progress: percent(task.progress),
    Step: task.step,
    Begun: moment(task.created),
    Ended: task.ended ? moment(task.ended) : "",
    By: requesterName(task.requester),
    Problem: task.problem?.detail,
    "What to do": task.problem?.advice,
    UUID: task.uuid,
  });
  const buttons = [
    { label: "Close", value: null },
    { label: "Open its object", value: "do", kind: "primary" },
  ];
  const hash = hashOf(task.about);
  if ((await dialog(taskWords(task), about.element, hash ? buttons : buttons.slice(0, 1))) && hash) go(hash);
}

/** The address of the first of these objects that has a page; `null` if none has. */
function hashOf(about) {
  const pages = {
    vm: (uuid) => `#/vm/${uuid}`,
    vdi: (uuid) => `#/disk/${uuid}`,
    sr: (uuid) => `#/sr/${uuid}`,
    vbd: (uuid) => `#/disk/${state.vbd.get(uuid).vdi}/${uuid}`,
  };
  const found = about.find(({ kind, uuid }) => kind in pages && state[kind].has(uuid));
  return found ? pages[found.kind](found.uuid) : null;
}

export const taskRows = (tasks) =>
  tasks
    .filter((task) => matches(taskWords(task), task.verb, task.state, task.uuid, task.problem?.detail))
    .map((task) => ({ ...task, key: task.uuid }));

/** Who has asked for something; nothing for the daemon itself. */
export function requesterName(requester) {
  if (!requester || requester.type === "daemon") return "";
  return requester.name ?? (requester.uid === undefined ? "" : `uid ${requester.uid}`);
}

/** What a change is about, as people call it. */
const whatOf = ({ kind, event, object }) =>
  event.kind === "task"
    ? `task: ${taskWords(object)}`
    : `${kind} ${object?.name ?? objectName(event.kind, event.uuid)}`;

/** The changes, each a line that wraps: `draw()`. */
export function changeList() {
  const list = h("ul", { class: "changes" });
  const none = h("p", { class: "empty dim" }, "No changes yet");
  const line = (one) => {
    const { event, text, level, count, requester } = one;
    const href = hashOf([{ kind: event.kind, uuid: event.uuid }, ...(event.object?.about ?? [])]);
    const words = h("span", { "data-level": level }, count > 1 ? `${text} (${count} times)` : text);
    const by = requesterName(requester);
    return h(
      "li",
      {},
      h("span", { class: "dim" }, time(one.at)),
      h("span", {}, h("a", { href }, whatOf(one)), " ", words, by ? h("span", { class: "dim" }, ` by ${by}`) : null),
    );
  };
  let drawn = null;
  return {
    element: h("div", { class: "scroll short", tabindex: 0, role: "region", "aria-label": "Changes" }, list, none),
    draw() {
      const now = changes.map((one) => `${one.at} ${one.count} ${one.key} ${whatOf(one)}`).join("\n");
      if (now === drawn) return;
      drawn = now;
      none.hidden = changes.length > 0;
      list.replaceChildren(...changes.map(line));
    },
  };
}

export function slowTable() {
  const columns = [
    { title: "Disk", grow: true, text: (row) => nameOf(row.now) },
    { title: "Request", text: (row) => row.request.operation },
    { title: "Age", num: true, text: (row) => duration(row.request.age_ns) },
    { title: "Waits for", text: (row) => (row.request.stage === "storage" ? "storage" : "disk process") },
    { title: "Size", num: true, rank: 1, text: (row) => bytes(row.request.size) },
    { title: "Offset", num: true, rank: 2, text: (row) => bytes(row.request.offset) },
  ];
  const table = new Table("Oldest requests in flight", columns, { onOpen: openDisk, empty: "No request is in flight" });
  table.element.classList.add("short");
  return table;
}

/** The oldest requests in flight of all disks. */
export function slowest() {
  const all = [];
  for (const { now } of state.disks.values()) {
    now.requests.forEach((request, index) => all.push({ key: `${now.vbd} ${index}`, now, request }));
  }
  return all.sort((a, b) => b.request.age_ns - a.request.age_ns).slice(0, 20);
}
