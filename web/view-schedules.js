// Schedules of snapshots, of disks and of VMs: what each keeps, its last snapshot, and why one failed.

import { schedule } from "./actions.js";
import { get } from "./api.js";
import { h } from "./dom.js";
import { ago } from "./format.js";
import { go, Kept, matches, section } from "./parts.js";
import { state, want } from "./store.js";
import { Table } from "./table.js";

/** How often the snapshots of VMs are read, in milliseconds. */
const PERIOD = 30000;
export const PERIODS = ["hourly", "daily", "weekly", "monthly"];

/** What a schedule keeps, in words. */
export function scheduleWords({ retention }) {
  const kept = PERIODS.filter((period) => retention?.[period]).map((period) => `${retention[period]} ${period}`);
  return kept.length ? `Keeps ${kept.join(", ")}` : "No schedule";
}

function lastOfDisk(uuid) {
  const times = [...state.vdi.values()]
    .filter((vdi) => vdi.snapshot_of === uuid && vdi.scheduled)
    .map((vdi) => vdi.snapshot_time);
  return times.sort().at(-1);
}

export function schedules() {
  want(null);
  const lastOfVm = new Map();
  let readAt = 0;
  const read = async () => {
    readAt = Date.now();
    for (const vm of [...state.vm.values()].filter((one) => one.retention)) {
      const all = await get(`/vms/${vm.uuid}/snapshots`).catch(() => []);
      lastOfVm.set(
        vm.uuid,
        all
          .filter((one) => one.scheduled)
          .map((one) => one.created)
          .sort()
          .at(-1),
      );
    }
  };
  const buttons = new Kept((key) => {
    const [list, uuid] = key.split(" ");
    const object = () => state[list === "vms" ? "vm" : "vdi"].get(uuid);
    return h("button", { type: "button", onclick: () => schedule(list, object()) }, "Change");
  });
  const columns = [
    { title: "Disk or VM", grow: true, text: (row) => `${row.kind} ${row.name}` },
    {
      title: "Last result",
      text: (row) => (row.retention_problem ? "failed" : row.last ? "done" : "none yet"),
      level: (row) => (row.retention_problem ? "bad" : row.last ? "good" : "idle"),
    },
    { title: "Last snapshot", text: (row) => (row.last ? `${ago(row.last)} ago` : "–") },
    { title: "", width: 80, text: (row) => buttons.of(row.key) },
    { title: "Schedule", rank: 1, text: scheduleWords },
    { title: "Problem", grow: true, rank: 2, text: (row) => row.retention_problem?.detail ?? "" },
  ];
  const onOpen = (row) => go(row.kind === "VM" ? `#/vm/${row.uuid}` : `#/disk/${row.uuid}`);
  const table = new Table("Schedules", columns, {
    onOpen,
    empty: "No disk or VM has a schedule. Set one on its page.",
  });
  const rows = () =>
    [
      ...[...state.vm.values()]
        .filter((vm) => vm.retention)
        .map((vm) => ({ ...vm, kind: "VM", key: `vms ${vm.uuid}`, last: lastOfVm.get(vm.uuid) })),
      ...[...state.vdi.values()]
        .filter((vdi) => vdi.retention)
        .map((vdi) => ({ ...vdi, kind: "disk", key: `vdis ${vdi.uuid}`, last: lastOfDisk(vdi.uuid) })),
    ]
      .filter((row) => matches(row.name, row.uuid, row.tags ?? []))
      .sort((a, b) => Boolean(b.retention_problem) - Boolean(a.retention_problem) || (a.name < b.name ? -1 : 1));
  return {
    element: h("div", {}, h("h1", {}, "Schedules"), section("Schedules of snapshots", table.element)),
    table,
    draw() {
      if (state.loaded && Date.now() - readAt > PERIOD) read();
      table.set(rows());
    },
  };
}
