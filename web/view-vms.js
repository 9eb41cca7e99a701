// The list of VMs with their disks, and of the disks of machines that are managed elsewhere.

import { createVm } from "./create.js";
import { h } from "./dom.js";
import { bytes, megabytes, number, short } from "./format.js";
import { powerLevel, vbdLevel, vbdWord } from "./health.js";
import { go, matches, section } from "./parts.js";
import { state, takeDisks, want } from "./store.js";
import { Table } from "./table.js";

/** VMs, each with its disks below it, and the disks of machines that are managed elsewhere. */
function rows() {
  const of = new Map();
  for (const vbd of state.vbd.values()) of.set(vbd.vm ?? null, [...(of.get(vbd.vm ?? null) ?? []), vbd]);
  const vms = [...state.vm.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
  const groups = vms.map((vm) => ({ vm, name: vm.name, key: vm.uuid }));
  groups.push({ vm: null, name: "Machines managed elsewhere", key: "elsewhere" });
  const all = [];
  for (const { vm, name, key } of groups) {
    const vbds = (of.get(vm?.uuid ?? null) ?? []).sort((a, b) => a.position - b.position);
    const nameOfVdi = (vbd) => state.vdi.get(vbd.vdi)?.name ?? short(vbd.vdi);
    const isFound = matches(name, vm?.uuid, vm?.power, vm?.tags ?? []);
    const found = isFound ? vbds : vbds.filter((vbd) => matches(nameOfVdi(vbd), vbd.uuid, vbdWord(vbd)));
    if (!found.length && !(vm && isFound)) continue;
    const disks = found.map((vbd) => state.disks.get(vbd.uuid)).filter(Boolean);
    const sum = (value) => (disks.length ? disks.reduce((total, disk) => total + (value(disk) ?? 0), 0) : undefined);
    const rate = { iops: sum((disk) => disk.rate?.iops), bytes: sum((disk) => disk.rate?.bytes) };
    all.push({ key, className: "group", inert: !vm, name, vm, rate, load: sum((disk) => disk.load) });
    for (const vbd of found) {
      const disk = state.disks.get(vbd.uuid);
      all.push({ key: vbd.uuid, className: "level1", name: nameOfVdi(vbd), vbd, rate: disk?.rate, load: disk?.load });
    }
  }
  return all;
}

export function machines() {
  want("/statistics", takeDisks);
  const columns = [
    { title: "VM and disks", grow: true, text: (row) => row.name },
    {
      title: "State",
      text: ({ vm, vbd }) => (vm ? vm.power : vbd ? vbdWord(vbd) : ""),
      level: ({ vm, vbd }) => (vm ? powerLevel(vm) : vbdLevel(vbd)),
    },
    { title: "IOPS", num: true, rank: 1, text: (row) => (row.rate ? number(row.rate.iops) : "") },
    { title: "MB/s", num: true, rank: 4, text: (row) => (row.rate ? megabytes(row.rate.bytes) : "") },
    { title: "Queue", num: true, rank: 3, text: (row) => (row.rate ? number(row.load) : "") },
    { title: "CPUs", num: true, rank: 5, text: ({ vm }) => vm?.vcpus ?? "" },
    { title: "Memory", num: true, rank: 5, text: ({ vm }) => (vm ? bytes(vm.memory) : "") },
    { title: "Tags", rank: 6, text: ({ vm, vbd }) => ((vm ?? vbd)?.tags ?? []).join(", ") },
  ];
  const onOpen = ({ vm, vbd }) => go(vm ? `#/vm/${vm.uuid}` : `#/disk/${vbd.vdi}/${vbd.uuid}`);
  const table = new Table("VMs and their disks", columns, { onOpen, empty: "No VMs, and no disks of other machines" });
  const create = h("button", { type: "button", class: "primary", onclick: () => createVm() }, "Create a VM");
  return {
    element: h(
      "div",
      {},
      h("div", { class: "title" }, h("h1", {}, "VMs"), create),
      section("VMs and their disks", table.element),
    ),
    table,
    draw: () => table.set(rows()),
  };
}
