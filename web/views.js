// The views of the host, of all disks, repositories and tasks.

import { createDisk } from "./create.js";
import { facts, h, setText } from "./dom.js";
import { ago, bytes, forecast, megabytes, number } from "./format.js";
import { severity, spaceWords, srLevel, srWord, vdiLevel, vdiWord } from "./health.js";
import {
  changeList,
  diskTable,
  go,
  matches,
  openDisk,
  section,
  shownDisks,
  slowest,
  slowTable,
  snapshotName,
  spaceBar,
  srRows,
  srTable,
  taskRows,
  taskTable,
} from "./parts.js";
import { isOpen, nameOf, state, takeDisks, want } from "./store.js";
import { Table } from "./table.js";
import { importDisk } from "./upload.js";

/** Numbers of the host, each in a tile. */
function tiles() {
  const made = facts();
  made.element.className = "tiles";
  return made;
}

function hostTiles(host) {
  const all = [...state.disks.values()];
  const sum = (value) => all.reduce((total, disk) => total + (value(disk) ?? 0), 0);
  const running = [...state.vm.values()].filter((vm) => vm.power === "running").length;
  return {
    "VMs running": `${running} of ${state.vm.size}`,
    "Disks plugged": state.host.plugging ? `${state.host.plugged} (+${state.host.plugging})` : state.host.plugged,
    IOPS: number(sum((disk) => disk.rate?.iops)),
    Throughput: megabytes(sum((disk) => disk.rate?.bytes)),
    "In flight": number(sum((disk) => disk.now.in_flight)),
    Memory: bytes(state.host.memory),
  };
}

export function overview() {
  want("/statistics", takeDisks);
  const [numbers, srs, tasks, events, slow] = [tiles(), srTable(), taskTable(false), changeList(), slowTable()];
  const disks = diskTable("Disks by load", "No disk is plugged");
  tasks.element.classList.add("short");
  const [heading, version] = [h("h1", {}, "Host"), h("span", { class: "dim" })];
  const element = h(
    "div",
    {},
    h("div", { class: "title" }, heading, version),
    numbers.element,
    h(
      "div",
      { class: "split" },
      h("div", {}, section("Disks by load", disks.element), section("Oldest requests in flight", slow.element)),
      h(
        "div",
        {},
        section("Repositories", srs.element),
        section("Running tasks", tasks.element),
        section("Changes", events.element),
      ),
    ),
  );
  return {
    element,
    table: disks,
    draw() {
      if (state.host) {
        setText(heading, state.host.name);
        setText(version, `${state.host.cpus} processors, Tapline ${state.host.version}, up ${ago(state.host.started)}`);
        numbers.set(hostTiles());
      }
      srs.set(srRows());
      tasks.set(taskRows(state.tasks.filter(isOpen)));
      events.draw();
      disks.set(shownDisks());
      slow.set(slowest());
    },
  };
}

export function repositories() {
  want(null);
  const table = srTable();
  table.element.classList.remove("short");
  return {
    element: h("div", {}, h("h1", {}, "Repositories"), section("All repositories", table.element)),
    table,
    draw: () => table.set(srRows()),
  };
}

/** VDIs as a tree: snapshots below their disks, by time. */
function tree(vdis) {
  const here = new Set(vdis.map((vdi) => vdi.uuid));
  const below = new Map();
  const roots = [];
  for (const vdi of vdis) {
    if (here.has(vdi.snapshot_of)) below.set(vdi.snapshot_of, [...(below.get(vdi.snapshot_of) ?? []), vdi]);
    else roots.push(vdi);
  }
  const rows = [];
  roots.sort((a, b) => severity(b.health) - severity(a.health) || (a.name < b.name ? -1 : 1));
  for (const root of roots) {
    const snapshots = (below.get(root.uuid) ?? []).sort((a, b) => (a.snapshot_time < b.snapshot_time ? -1 : 1));
    const found = [root, ...snapshots].filter((vdi) => matches(vdi.name, vdi.uuid, vdi.tags, vdiWord(vdi)));
    if (!found.length) continue;
    rows.push({ ...root, key: root.uuid });
    for (const vdi of found.filter((one) => one !== root)) {
      rows.push({ ...vdi, key: vdi.uuid, className: "level1", name: `↳ ${snapshotName(vdi, root)}` });
    }
  }
  return rows;
}

function vdiTable(label, hasSr) {
  const vms = (vdi) =>
    [...new Set(vdi.users.map((user) => state.vm.get(state.vbd.get(user.vbd)?.vm)?.name))].filter(Boolean).join(", ");
  const columns = [
    { title: "Disk and snapshots", grow: true, text: (vdi) => vdi.name },
    { title: "State", text: vdiWord, level: vdiLevel },
    { title: "Size", num: true, text: (vdi) => bytes(vdi.size) },
    { title: "Used", num: true, rank: 1, text: (vdi) => bytes(vdi.physical_utilisation) },
    { title: "VM", grow: true, rank: 2, text: vms },
    ...(hasSr ? [{ title: "Repository", rank: 3, text: (vdi) => state.sr.get(vdi.sr)?.name ?? "" }] : []),
    { title: "Tags", rank: 5, text: (vdi) => (vdi.tags ?? []).join(", ") },
    { title: "Format", rank: 6, text: (vdi) => vdi.format },
    { title: "Chain", num: true, rank: 7, text: (vdi) => vdi.depth },
  ];
  return new Table(label, columns, { onOpen: (vdi) => go(`#/disk/${vdi.key}`), empty: "No disks" });
}

export function allDisks() {
  want(null);
  const table = vdiTable("All disks and snapshots", true);
  const create = h("button", { type: "button", class: "primary", onclick: () => createDisk() }, "Create a disk");
  const importing = h("button", { type: "button", onclick: () => importDisk() }, "Import a disk");
  return {
    element: h(
      "div",
      {},
      h("div", { class: "title" }, h("h1", {}, "Disks"), create, importing),
      section("All disks and their snapshots", table.element),
    ),
    table,
    draw: () => table.set(tree([...state.vdi.values()])),
  };
}

export function repository(uuid) {
  want(`/statistics?sr=${encodeURIComponent(uuid)}`, takeDisks);
  const [heading, word, info] = [h("h1", {}, "Repository"), h("span"), facts()];
  const [bar, text] = [spaceBar("Space used"), h("span")];
  let busiest = null;
  const button = h("button", { type: "button", onclick: () => busiest && openDisk(busiest) });
  const create = h("button", { type: "button", class: "primary", onclick: () => createDisk(uuid) }, "Create a disk");
  const importing = h("button", { type: "button", onclick: () => importDisk(uuid) }, "Import a disk");
  const disks = diskTable("Disks by load", "No disk of this repository is plugged");
  const chains = vdiTable("Disks and their snapshots", false);
  const element = h(
    "div",
    {},
    h("div", { class: "title" }, heading, word),
    h("div", { class: "bar" }, bar.element, text),
    info.element,
    h("div", { class: "bar" }, create, importing, button),
    h(
      "div",
      { class: "split" },
      section("Disks and their snapshots", chains.element),
      section("Disks by load", disks.element),
    ),
  );
  return {
    element,
    table: chains,
    draw() {
      const sr = state.sr.get(uuid);
      if (!sr) {
        setText(heading, state.loaded ? `There is no repository ${uuid}` : "Loading…");
        button.hidden = true;
        create.hidden = importing.hidden = true;
        return;
      }
      create.hidden = importing.hidden = false;
      setText(heading, sr.name);
      setText(word, srWord(sr));
      word.dataset.level = srLevel(sr);
      bar.set(sr);
      setText(text, spaceWords(sr));
      info.set({
        Storage: sr.variant ? `${sr.variant.filesystem} at ${sr.variant.path}` : "",
        Snapshots: sr.variant?.versions,
        Forecast: sr.space ? forecast(sr.space) : "",
        Tags: (sr.tags ?? []).join(", "),
        Reason: sr.health?.reason,
        Problem: sr.problem?.detail,
        "What to do": sr.health?.advice || sr.problem?.advice,
      });
      const iops = (one) => one.rate?.iops ?? 0;
      busiest = [...state.disks.values()].sort((a, b) => b.load - a.load || iops(b) - iops(a))[0];
      button.hidden = !busiest;
      if (busiest) setText(button, `Busiest disk: ${nameOf(busiest.now)} (${number(busiest.rate?.iops)} IOPS)`);
      disks.set(shownDisks());
      chains.set(tree([...state.vdi.values()].filter((vdi) => vdi.sr === uuid)));
    },
  };
}

export function allTasks() {
  want(null);
  const [open, ended] = [taskTable(true), taskTable(true)];
  open.element.classList.add("short");
  return {
    element: h("div", {}, h("h1", {}, "Tasks"), section("Running", open.element), section("Ended", ended.element)),
    table: ended,
    draw() {
      open.set(taskRows(state.tasks.filter((task) => !task.ended)));
      ended.set(taskRows(state.tasks.filter((task) => task.ended)));
    },
  };
}
