// Snapshots of a disk or of a VM as a tree from the oldest to the present, with what can be done with each.

import { revert } from "./actions.js";
import { destroyVmSnapshot, pinSnapshot, revertVm } from "./actions-vm.js";
import { dialog, facts, h, setAttribute } from "./dom.js";
import { ago, bytes, moment } from "./format.js";
import { Kept, snapshotName } from "./parts.js";
import { state } from "./store.js";
import { Table } from "./table.js";

/** A button that reverts to a snapshot; `set(why)` says why it is off. */
function revertButton(onclick) {
  const element = h("button", { type: "button", onclick }, "Revert");
  return {
    element,
    set(why) {
      element.disabled = Boolean(why);
      setAttribute(element, "title", why || null);
    },
  };
}

/** A table of snapshots; `buttonOf(row)` is the button of a row. */
function snapshotTable(label, buttonOf, hasUsed, onOpen) {
  const columns = [
    { title: "Snapshot", grow: true, text: (one) => (one.isNow ? "● now" : `├ ${one.name}`) },
    { title: "Taken", text: (one) => (one.isNow ? "" : `${ago(one.taken)} ago`) },
    { title: "", width: 64, text: (one) => (one.isNow ? "" : buttonOf(one)) },
    { title: "By", rank: 2, text: (one) => (one.isNow ? "" : one.scheduled ? "schedule" : "request") },
    { title: "Date", rank: 3, text: (one) => (one.isNow ? "" : moment(one.taken)) },
    ...(hasUsed ? [{ title: "Used", num: true, rank: 1, text: (one) => bytes(one.physical_utilisation) }] : []),
  ];
  const table = new Table(label, columns, { onOpen, empty: "No snapshots" });
  table.element.classList.add("short");
  return table;
}

/** The snapshots of a disk: `set(vdi, vbd)`. Each opens its page. */
export function diskSnapshots() {
  let disk = null;
  const lines = new Kept((key) => revertButton(() => revert(disk.vdi, state.vdi.get(key))));
  const buttonOf = (row) => {
    const button = lines.of(row.key);
    const isOff = !disk.vbd || disk.vbd.state === "unplugged";
    button.set(isOff ? "" : "The disk is plugged: shut its VM down, or unplug the disk");
    return button.element;
  };
  const onOpen = (row) => {
    location.hash = `#/disk/${row.key}`;
  };
  const table = snapshotTable("Snapshots of the disk", buttonOf, true, onOpen);
  return {
    table,
    set(vdi, vbd) {
      disk = { vdi, vbd };
      const all = [...state.vdi.values()].filter((other) => other.snapshot_of === vdi.uuid);
      all.sort((a, b) => (a.snapshot_time < b.snapshot_time ? -1 : 1));
      const rows = all.map((snapshot) => ({
        ...snapshot,
        key: snapshot.uuid,
        taken: snapshot.snapshot_time,
        name: snapshotName(snapshot, vdi),
      }));
      if (rows.length)
        rows.push({ key: "now", isNow: true, inert: true, physical_utilisation: vdi.physical_utilisation });
      table.set(rows);
    },
  };
}

/** Shows a snapshot of a VM, and does what is selected with it. */
async function openVmSnapshot(vm, snapshot) {
  const about = facts();
  const disks = snapshot.disks.filter((disk) => disk.snapshot).map((disk) => state.vdi.get(disk.vdi)?.name ?? disk.vdi);
  about.set({
    Taken: moment(snapshot.created),
    Disks: disks.join(", "),
    Description: snapshot.description,
    Kept: snapshot.scheduled ? "until its schedule destroys it" : "until it is destroyed",
  });
  const all = [
    { label: "Close", value: null },
    { label: "Destroy", value: "destroy", kind: "danger" },
  ];
  if (snapshot.scheduled) all.push({ label: "Pin", value: "pin" });
  const answer = await dialog(snapshot.name, about.element, all);
  if (answer === "pin") await pinSnapshot(vm, snapshot);
  if (answer === "destroy") await destroyVmSnapshot(vm, snapshot);
}

/** The snapshots of a VM: `set(vm, snapshots)`; `changed` is called after something was done with one. */
export function vmSnapshots(changed) {
  let [vm, all] = [null, []];
  const one = (key) => all.find((snapshot) => snapshot.uuid === key);
  const lines = new Kept((key) =>
    revertButton(async () => {
      await revertVm(vm, one(key));
      changed();
    }),
  );
  const buttonOf = (row) => {
    const button = lines.of(row.key);
    button.set(vm.power === "halted" ? "" : "The VM must be halted: shut it down first");
    return button.element;
  };
  const onOpen = async (row) => {
    await openVmSnapshot(vm, one(row.key));
    changed();
  };
  const table = snapshotTable("Snapshots of the VM", buttonOf, false, onOpen);
  return {
    table,
    set(now, snapshots) {
      [vm, all] = [now, snapshots];
      const rows = snapshots.map((snapshot) => ({
        ...snapshot,
        key: snapshot.uuid,
        taken: snapshot.created,
        name: snapshotName(snapshot, now),
      }));
      if (rows.length) rows.push({ key: "now", isNow: true, inert: true });
      table.set(rows);
    },
  };
}
