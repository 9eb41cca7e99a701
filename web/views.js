// Views of everything but a single disk: the overview, repositories, and VMs with their disks.

import { cancelTask } from "./actions.js";
import { facts, h, setAttribute, setText } from "./dom.js";
import { bytes, duration, forecast, megabytes, number, percent, short, time } from "./format.js";
import { nameOf, state, takeDisks, want } from "./store.js";
import { Table } from "./table.js";

export const go = (hash) => {
  location.hash = hash;
};

/** Whether any of these words has the text of the filter. */
export function matches(...words) {
  const text = document.getElementById("filter").value.trim().toLowerCase();
  return !text || words.some((word) => word && String(word).toLowerCase().includes(text));
}

const openDisk = (row) => go(`#/disk/${row.now.vdi}/${row.now.vbd}`);

/** A table of disks by load. */
export function diskTable(label, empty) {
  const oldest = ({ now }) => (now.oldest_ns === undefined ? "" : duration(now.oldest_ns));
  const columns = [
    { title: "Disk", text: (row) => nameOf(row.now), sort: (row) => nameOf(row.now) },
    { title: "SR", text: (row) => row.now.sr_name, sort: (row) => row.now.sr_name, wide: true },
    { title: "IOPS", num: true, text: (row) => number(row.rate?.iops), sort: (row) => row.rate?.iops ?? 0 },
    { title: "MB/s", num: true, wide: true, text: ({ rate }) => megabytes(rate?.bytes),
      sort: ({ rate }) => rate?.bytes ?? 0 },
    { title: "Queue", num: true, text: (row) => number(row.load), sort: (row) => row.load },
    { title: "Latency", num: true, wide: true, text: (one) => duration(latency(one)),
      sort: (one) => latency(one) ?? 0 },
    { title: "Oldest", num: true, text: oldest, sort: (row) => row.now.oldest_ns ?? 0 },
  ];
  return new Table(label, columns, { onOpen: openDisk, sortBy: 4, empty });
}

/** The average duration of the requests that were answered since the last reading. */
function latency(row) {
  if (!row.rate || !row.rate.iops) return null;
  return (row.rate.load / row.rate.iops) * 1e9;
}

const shownDisks = () =>
  [...state.disks.values()].filter(({ now }) => matches(nameOf(now), now.sr_name, now.vbd, now.vdi));

/** Space of a repository as a bar, in a row of a table with its part alone. */
function spaceBar(label, isBrief) {
  const meter = h("meter", { min: 0, max: 1, "aria-label": label });
  const text = h("span");
  return {
    element: h("span", { class: "bar" }, meter, text),
    set(space) {
      meter.parentElement.hidden = !space;
      if (!space) return;
      const part = space.physical_size ? space.physical_utilisation / space.physical_size : 0;
      if (meter.value !== part) meter.value = part;
      setText(text, isBrief ? percent(part)
        : `${percent(part)} of ${bytes(space.physical_size)}, ${bytes(space.free)} free`);
    },
  };
}

/** One object for each row, kept while the row is there: its elements are not made again. */
class Kept {
  constructor(make) {
    this.make = make;
    this.all = new Map();
  }

  of(key) {
    if (!this.all.has(key)) this.all.set(key, this.make(key));
    return this.all.get(key);
  }
}

function srTable() {
  const bars = new Kept((uuid) => spaceBar(`Space used in ${state.sr.get(uuid)?.name ?? "the repository"}`, true));
  const columns = [
    { title: "SR", text: (sr) => sr.name, sort: (sr) => sr.name },
    { title: "State", wide: true, text: (sr) => sr.state },
    { title: "Space", text: (sr) => {
      const bar = bars.of(sr.key);
      bar.set(sr.space);
      return bar.element;
    } },
    { title: "Free", num: true, wide: true, text: (sr) => bytes(sr.space?.free) },
    { title: "Forecast", text: (sr) => (sr.space ? forecast(sr.space) : "") },
  ];
  const onOpen = (sr) => go(`#/sr/${sr.key}`);
  const table = new Table("Repositories", columns, { onOpen, sortBy: 0, empty: "No repositories" });
  table.sort.down = false;
  table.element.classList.add("short");
  return table;
}

const srRows = () => [...state.sr.values()].filter((sr) => matches(sr.name, sr.uuid))
  .map((sr) => ({ ...sr, key: sr.uuid, className: sr.state === "attached" ? "" : "warn" }));

/** The open tasks, each with its progress and a button that cancels it. */
function taskTable() {
  const parts = new Kept((uuid) => {
    const bar = h("progress", { max: 1, "aria-label": "Progress" });
    const text = h("span");
    const task = () => state.tasks.find((one) => one.uuid === uuid);
    const button = h("button", { type: "button", onclick: () => cancelTask(task()) }, "Cancel");
    return { bar, text, button, line: h("span", { class: "bar" }, bar, text) };
  });
  const columns = [
    { title: "Task", text: (task) => task.verb },
    { title: "About", wide: true, text: (task) => task.about.map((one) => objectName(one.kind, one.uuid)).join(", ") },
    { title: "Progress", text: (task) => {
      const { bar, text, line } = parts.of(task.key);
      if (bar.value !== task.progress) bar.value = task.progress;
      setText(text, percent(task.progress));
      return line;
    } },
    { title: "State", wide: true, text: (task) => `${task.state}${task.problem ? `: ${task.problem.detail}` : ""}` },
    { title: "", text: (task) => {
      const { button } = parts.of(task.key);
      const can = task.cancellable && task.state !== "cancelling";
      if (button.disabled === can) button.disabled = !can;
      setAttribute(button, "aria-label", `Cancel ${task.verb}`);
      return button;
    } },
  ];
  const table = new Table("Tasks", columns, { empty: "No open tasks" });
  table.element.classList.add("short");
  return table;
}

function objectName(kind, uuid) {
  const object = state[kind] instanceof Map ? state[kind].get(uuid) : null;
  if (kind === "vbd" && object) return `VBD of ${state.vdi.get(object.vdi)?.name ?? short(object.vdi)}`;
  return object?.name ?? `${kind} ${short(uuid)}`;
}

function eventTable() {
  const what = (event) => event.object?.name ?? (event.kind === "task"
    ? `${event.object?.verb ?? ""} ${event.object?.state ?? ""}`.trim() : objectName(event.kind, event.uuid));
  const who = ({ requester }) => requester?.name ?? (requester?.uid === undefined ? "" : `uid ${requester.uid}`);
  const columns = [
    { title: "Object", text: (event) => `${event.kind}: ${what(event)}` },
    { title: "Change", text: (event) => event.change },
    { title: "Time", text: (event) => time(event.at) },
    { title: "By", wide: true, text: who },
  ];
  const table = new Table("Events", columns, { empty: "No events yet" });
  table.element.classList.add("short");
  return table;
}

function slowTable() {
  const columns = [
    { title: "Disk", text: (row) => nameOf(row.now) },
    { title: "Request", text: (row) => row.request.operation },
    { title: "At", num: true, wide: true, text: (row) => bytes(row.request.offset) },
    { title: "Size", num: true, wide: true, text: (row) => bytes(row.request.size) },
    { title: "Age", num: true, text: (row) => duration(row.request.age_ns) },
    { title: "With", text: (row) => (row.request.stage === "storage" ? "storage" : "disk") },
  ];
  const table = new Table("Slowest requests in flight", columns, { onOpen: openDisk, empty: "None in flight" });
  table.element.classList.add("short");
  return table;
}

/** The oldest requests in flight of all disks. */
function slowest() {
  const all = [];
  for (const { now } of state.disks.values()) {
    now.requests.forEach((request, index) => all.push({ key: `${now.vbd} ${index}`, now, request }));
  }
  return all.sort((a, b) => b.request.age_ns - a.request.age_ns).slice(0, 20);
}

const section = (title, ...content) => h("section", { "aria-label": title }, h("h2", {}, title), content);

export function overview() {
  want("/statistics", takeDisks);
  const [host, srs, tasks, events, disks, slow] =
    [facts(), srTable(), taskTable(), eventTable(), diskTable("Disks by load", "No disk is plugged"), slowTable()];
  const heading = h("h1", {}, "Host");
  const element = h("div", {}, heading, host.element, section("Busiest disks", disks.element),
    h("div", { class: "grid" }, section("Repositories", srs.element),
      section("Slowest requests in flight", slow.element), section("Tasks", tasks.element),
      section("Last events", events.element)));
  return {
    element,
    table: disks,
    draw() {
      if (state.host) {
        setText(heading, state.host.name);
        const all = [...state.disks.values()];
        const sum = (value) => all.reduce((total, disk) => total + (value(disk) ?? 0), 0);
        host.set({
          Version: state.host.version,
          Processors: state.host.cpus,
          Memory: bytes(state.host.memory),
          "Plugged disks": state.host.plugged,
          "Waiting plugs": state.host.plugging || "",
          IOPS: number(sum((disk) => disk.rate?.iops)),
          Throughput: megabytes(sum((disk) => disk.rate?.bytes)),
          "In flight": number(sum((disk) => disk.now.in_flight)),
        });
      }
      srs.set(srRows());
      tasks.set(state.tasks.map((task) => ({ ...task, key: task.uuid })));
      events.set(state.events.map((event) => ({ ...event, key: event.seq })));
      disks.set(shownDisks());
      slow.set(slowest());
    },
  };
}

export function repositories() {
  want(null);
  const table = srTable();
  table.element.classList.remove("short");
  return { element: h("div", {}, h("h1", {}, "Repositories"), table.element), table, draw: () => table.set(srRows()) };
}

/** The VDIs of a repository as a tree: snapshots under their disks, by time. */
function tree(sr) {
  const vdis = [...state.vdi.values()].filter((vdi) => vdi.sr === sr);
  const here = new Set(vdis.map((vdi) => vdi.uuid));
  const below = new Map();
  const roots = [];
  for (const vdi of vdis) {
    if (here.has(vdi.snapshot_of)) {
      below.set(vdi.snapshot_of, [...(below.get(vdi.snapshot_of) ?? []), vdi]);
    } else {
      roots.push(vdi);
    }
  }
  const rows = [];
  roots.sort((a, b) => (a.name < b.name ? -1 : 1));
  for (const root of roots) {
    const snapshots = (below.get(root.uuid) ?? []).sort((a, b) => (a.snapshot_time < b.snapshot_time ? -1 : 1));
    const found = [root, ...snapshots].filter((vdi) => matches(vdi.name, vdi.uuid));
    if (!found.length) continue;
    rows.push({ ...root, key: root.uuid });
    for (const vdi of found) if (vdi !== root) rows.push({ ...vdi, key: vdi.uuid, className: "level1" });
  }
  return rows;
}

export function repository(uuid) {
  want(`/statistics?sr=${encodeURIComponent(uuid)}`, takeDisks);
  const [heading, info, bar] = [h("h1", {}, "Repository"), facts(), spaceBar("Space used")];
  let busiest = null;
  const button = h("button", { type: "button", class: "primary", onclick: () => busiest && openDisk(busiest) });
  const disks = diskTable("Disks by load", "No disk of it is plugged");
  const columns = [
    { title: "VDI", text: (vdi) => (vdi.className ? `↳ ${vdi.name}` : vdi.name) },
    { title: "Size", num: true, text: (vdi) => bytes(vdi.size) },
    { title: "Used", num: true, text: (vdi) => bytes(vdi.physical_utilisation) },
    { title: "Format", wide: true, text: (vdi) => vdi.format },
    { title: "Chain", num: true, wide: true, text: (vdi) => vdi.depth },
    { title: "State", text: (vdi) =>
      [vdi.state, vdi.read_only && "read-only", vdi.users.length && "in use"].filter(Boolean).join(", ") },
  ];
  const onOpen = (vdi) => go(`#/disk/${vdi.key}`);
  const chains = new Table("VDIs and their snapshots", columns, { onOpen, empty: "No VDIs" });
  const element = h("div", {}, heading, info.element, h("div", { class: "bar" }, bar.element, button),
    section("Disks by load", disks.element), section("VDIs and their snapshots", chains.element));
  return {
    element,
    table: disks,
    draw() {
      const sr = state.sr.get(uuid);
      if (!sr) {
        setText(heading, state.loaded ? `There is no repository ${uuid}` : "Loading…");
        button.hidden = true;
        return;
      }
      setText(heading, sr.name);
      bar.set(sr.space);
      info.set({
        State: sr.state, Storage: sr.variant ? `${sr.variant.filesystem} at ${sr.variant.path}` : "",
        Snapshots: sr.variant?.versions, Forecast: sr.space ? forecast(sr.space) : "",
        Reserve: sr.reserve ? bytes(sr.reserve) : "", Problem: sr.problem?.detail, "What to do": sr.problem?.advice,
      });
      const iops = (one) => one.rate?.iops ?? 0;
      busiest = [...state.disks.values()].sort((a, b) => b.load - a.load || iops(b) - iops(a))[0];
      button.hidden = !busiest;
      if (busiest) setText(button, `Busiest disk: ${nameOf(busiest.now)} (${number(busiest.rate?.iops)} IOPS)`);
      disks.set(shownDisks());
      chains.set(tree(uuid));
    },
  };
}

/** VMs, each with its disks below it, and the disks of machines that are managed elsewhere. */
function vmRows() {
  const of = new Map();
  for (const vbd of state.vbd.values()) of.set(vbd.vm ?? null, [...(of.get(vbd.vm ?? null) ?? []), vbd]);
  const vms = [...state.vm.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
  const groups = vms.map((vm) => ({ vm, name: vm.name, text: vm.power, key: vm.uuid }));
  groups.push({ vm: null, name: "Machines that are managed elsewhere", text: "", key: "elsewhere" });
  const rows = [];
  for (const { vm, name, text, key } of groups) {
    const vbds = (of.get(vm?.uuid ?? null) ?? []).sort((a, b) => a.position - b.position);
    const nameOfVdi = (vbd) => state.vdi.get(vbd.vdi)?.name ?? short(vbd.vdi);
    const found = vbds.filter((vbd) => matches(name, nameOfVdi(vbd), vbd.uuid));
    if (!found.length && !(vm && matches(name, vm.uuid))) continue;
    rows.push({ key, className: "group", inert: true, name, state: text, vm });
    for (const vbd of found) {
      const disk = state.disks.get(vbd.uuid);
      const title = `${vbd.position}: ${nameOfVdi(vbd)}`;
      rows.push({ key: vbd.uuid, className: "level1", name: title, state: vbd.state, vbd, disk });
    }
  }
  return rows;
}

export function machines() {
  want("/statistics", takeDisks);
  const columns = [
    { title: "VM and disks", text: (row) => row.name },
    { title: "State", text: (row) => row.state },
    { title: "IOPS", num: true, text: (row) => (row.vbd ? number(row.disk?.rate?.iops) : "") },
    { title: "MB/s", num: true, wide: true, text: (row) => (row.vbd ? megabytes(row.disk?.rate?.bytes) : "") },
    { title: "Queue", num: true, wide: true, text: (row) => (row.vbd ? number(row.disk?.load) : "") },
    { title: "", wide: true, text: ({ vm, vbd }) =>
      (vm ? `${vm.vcpus} CPUs, ${bytes(vm.memory)}` : vbd?.transport ?? "") },
  ];
  const onOpen = (row) => go(`#/disk/${row.vbd.vdi}/${row.vbd.uuid}`);
  const table = new Table("VMs and their disks", columns, { onOpen, empty: "No VMs, and no disks of others" });
  return { element: h("div", {}, h("h1", {}, "VMs"), table.element), table, draw: () => table.set(vmRows()) };
}
